"""Simulation of whole deployments on a virtual clock: the real routers and instances, in which only time is made up."""
