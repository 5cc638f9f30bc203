"""Dispatch of single requests: instance selection, the hand-over state machine and migration."""
