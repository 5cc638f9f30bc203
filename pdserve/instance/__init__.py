"""Instance process: engine thread, KV events, and links to routers."""
