"""Profile: the costs of a model on a machine, as data that needs neither torch nor an engine. `tools/profiling/` measures it.

In reading order: profile, fit, drift.
"""
