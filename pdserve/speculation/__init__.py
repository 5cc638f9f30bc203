"""Speculation without a model: which tokens may follow a sequence, and how many of them a step should compute.

`Speculator` is the engine's drafter (`--speculate`). Whatever it proposes, the output stays what it is (`engine/step.py`), so
all of this is about time alone.

In reading order: matches, answers, lengths, speculator.
"""
