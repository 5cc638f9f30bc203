"""The built-in connectors: a file each, or a package.

In reading order: memory, shm, file, redis, tiered, nixl, mooncake.
"""
