"""The command line, and the processes that it starts and supervises."""
