"""Attacks on a deployment from outside, and what an innocent client sees of them."""
