"""Speculative decoding without a draft model: draft tokens by prompt lookup, and draft lengths by a cost model.

`Speculator` is the engine's drafter (`--speculate`). Drafts never change the output (`engine/step.py`), only its speed.

In reading order: matches, answers, lengths, speculator.
"""
