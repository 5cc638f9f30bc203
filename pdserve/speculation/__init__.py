"""Speculative decoding: draft tokens by prompt lookup, with lengths by a cost model, or by a second, smaller model.

`Speculator` or `DraftModel` is the engine's drafter (`--speculate`). Drafts never change the output, only its speed
(`engine/step.py`).

In reading order: matches, answers, lengths, speculator; model_drafter, draft_model.
"""
