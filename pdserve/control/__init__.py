"""The control plane: frames, certificates, and the registry of routers."""
