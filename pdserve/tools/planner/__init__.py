"""`pdserve plan`: the smallest fleet that meets an SLO, the best split of a fixed one, and whether disaggregation pays.

In reading order: command, settings, slo_file, targets, plan, search, tuning, measured, here, gpus, advice, deploy, charts.
"""
