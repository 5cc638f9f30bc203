"""Attached instances: their registration, lease and load, and the server to which they connect."""
