"""Layers that only some architectures have."""
