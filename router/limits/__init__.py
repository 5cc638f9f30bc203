"""API keys, their rate limits and the weighted fair queue."""
