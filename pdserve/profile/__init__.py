"""`pdserve profile`: what a model costs on a machine, as measured, imported, or reported by a fleet.

`profile` is the data, and all that simulations and plans import: it needs neither torch nor an engine.
"""
