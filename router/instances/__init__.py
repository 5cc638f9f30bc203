"""Attached instances: their registration, lease, load, and the server that they connect to."""
