"""Control plane: framed connections, certificates, and the router registry.

In reading order: frame_connection, coalescing_transport, certificates, registry, awake_clock, json_setting.
"""
