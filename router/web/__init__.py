"""The HTTP application: routes, dialects, keys, limits, admission and the live page.

In reading order: app, application, endpoint, dialect, parse_queue, admission, grammar_checker, warm_prompts; model_endpoints,
operator_endpoints, overview, pages; http_protocol, listening, tls_listener.
"""
