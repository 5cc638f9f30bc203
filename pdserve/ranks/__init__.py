"""Processes of tensor parallelism: rank 0 is the instance; each further rank is a follower that it starts and commands.

In reading order: leader, followers, follower, messages, rank_config, runners, table_changes, ranked_connector,
ranked_loader.
"""
