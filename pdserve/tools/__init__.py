"""SLO tools: what a model costs on a machine, loads, simulations of deployments, plans of fleets, and their scaling.

In reading order: load_config, machine, bench, offline_bench, profiling, roofline, simulator, planner, tuner, autoscaler.
"""
