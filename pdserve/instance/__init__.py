"""The instance process: engine loop, KV events, connections to routers."""
