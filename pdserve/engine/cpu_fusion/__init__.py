"""Fused and prepacked replacements of model layers on CPUs."""
