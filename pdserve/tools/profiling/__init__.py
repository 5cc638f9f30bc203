"""`pdserve profile`: measures what a model costs on a machine, imports it from published data, or asks a fleet.

In reading order: command, steps, contention, adapters, drafts, deployment, imports.
"""
