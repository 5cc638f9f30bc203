"""`shm://`: a store in the shared memory of one machine.

In reading order: connector, slab, segment.
"""
