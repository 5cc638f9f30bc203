"""The `pdserve` command line, and supervision of the processes that it starts."""
