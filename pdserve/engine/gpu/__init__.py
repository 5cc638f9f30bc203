"""Fused layers for GPUs, each found by trial, for 16-bit types. Norms and MLPs are those of `cpu_fusion/`."""
