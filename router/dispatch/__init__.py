"""Dispatch of single requests: instance selection, the hand-over state machine and migration.

In reading order: dispatcher, request_state, handover, selector, waiting, operations, adapter_changes.
"""
