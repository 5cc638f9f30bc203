"""`redis://`: Redis or Valkey, and clusters of them, as a store.

In reading order: connector, replies, cluster.
"""
