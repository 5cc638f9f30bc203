"""The controller of `pdserve autoscale`: steers the numbers of prefill and decode instances while traffic shifts."""
