"""Control plane: framed connections, certificates, and the router registry.

In reading order: frame_connection, certificates, registry, json_setting.
"""
