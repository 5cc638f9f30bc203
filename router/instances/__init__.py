"""Attached instances: their registration, lease and load, and the server to which they connect.

In reading order: fleet, control_server, frame_checks, compatibility, arrivals, controller_lease.
"""
