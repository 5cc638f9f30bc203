"""Adapters of architectures, and the layers that only some have."""
