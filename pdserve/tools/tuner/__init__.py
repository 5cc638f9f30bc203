"""`pdserve bench tune`: the settings of a real fleet of a given size that have the most margin to an SLO, within a budget.

In reading order: command, candidates.
"""
