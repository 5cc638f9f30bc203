"""`pdserve bench serve`: what a client of any OpenAI-compatible server sees under a given load.

    datasets, traces ──► Request ──► arrivals ──► workers (one process each: load, http_client) ──► Sample
                                                                                                      │
                 report, run_page ◄── metrics, breakdown ◄────────────────────────────────────────────┤
                                  ◄── sweep (many runs, each at one rate) ◄───────────────────────────┘

What decides (datasets, vocabulary, events, metrics, slo, sweep) reads no clock and opens no socket.

In reading order: command, datasets, traces, requests, vocabulary; workers, load, http_client, events, server,
energy; metrics, slo, sweep, report, run_page, page, plot.
"""
