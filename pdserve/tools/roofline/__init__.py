"""Roofline: profiles of models on GPUs that one does not have, from the model's config and the GPU's data sheet.

In reading order: shape, devices, estimate.
"""
