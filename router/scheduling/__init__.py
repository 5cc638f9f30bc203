"""Scheduling decisions: plain functions and data that pick instances for a request."""
