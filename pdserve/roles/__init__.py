"""Code shared by the prefill and decode roles: jobs, KV transfers, loading from the store."""
