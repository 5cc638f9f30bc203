"""The controller of `pdserve autoscale`: steers the numbers of prefill and decode instances while traffic shifts.

In reading order: command, controller, situation, observation, router_client, load, forecast, rehearsal, change, cell.
"""
