"""Instance process: engine thread, KV events, and links to routers.

In reading order: process, instance, router_link, hello, reporter, kv_events, kv_events_config, metrics_port, affinity,
gpu_fault.
"""
