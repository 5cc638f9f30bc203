"""API keys, their quotas, and the weighted fair queue."""
