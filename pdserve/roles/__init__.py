"""Shared by the prefill and decode roles: jobs, the transfer queue, and loading of stored prefixes.

In reading order: job, transfers, break_even.
"""
