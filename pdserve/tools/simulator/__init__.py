"""Simulation of whole deployments on a virtual clock: the real routers and instances, in which only time is made up.

In reading order: command, fleet, simulation, virtual_clock, router, instance, engine_thread, drafts, adapters, model,
store, cores, breakdown, verdict.
"""
