"""OpenAI's batch files: a request per line in, an answer per line out.

In reading order: command, lines, runner.
"""
