"""Launchers: where instances run, as the controller of `pdserve autoscale` starts and stops them.

In reading order: launcher, compose, kubernetes, ray_cluster, ray_actor.
"""
