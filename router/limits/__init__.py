"""API keys, their rate limits, and the admission queue."""
