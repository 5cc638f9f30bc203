"""Control plane: framed connections, certificates, and the router registry."""
