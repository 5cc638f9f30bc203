"""Launchers: where instances run, as the controller of `pdserve autoscale` starts and stops them."""
