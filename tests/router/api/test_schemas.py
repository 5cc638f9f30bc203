"""The schemas of request bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.router.api.schemas import NO_OPS, ChatBody, CompletionBody

if TYPE_CHECKING:
    pass


def test_no_field_is_both_supported_and_unsupported() -> None:
    assert not set(NO_OPS) & (set(CompletionBody.model_fields) | set(ChatBody.model_fields))
