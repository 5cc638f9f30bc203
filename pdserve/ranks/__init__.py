"""Processes of tensor parallelism: rank 0 is the instance; each further rank is a follower that it starts and commands."""
