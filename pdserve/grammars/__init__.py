"""Compiling grammars of structured output within limits, in a process of its own. Shared by routers and instances."""
