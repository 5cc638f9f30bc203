"""Dispatch of one request: instance selection, the hand-over state machine, hedging and migration."""
