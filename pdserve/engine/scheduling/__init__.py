"""Decisions of the engine: what a step computes, and for whom. Plain Python on plain data."""
