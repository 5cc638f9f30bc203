"""API keys, their rate limits, the memory of their bodies, and the admission queue."""
