"""What a model costs on a machine, as data: without torch and an engine. `tools/profiling/` measures it.

In reading order: profile, fit, drift.
"""
