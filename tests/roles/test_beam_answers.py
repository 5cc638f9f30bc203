"""Reports of beam searches: answers that are all finite, or an error if what the request allows leaves too few of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams

if TYPE_CHECKING:
    from tests.roles.conftest import RoleInstance


@pytest.mark.parametrize("num_banned", [0, 4, 5, 6])
def test_a_search_with_too_few_tokens_to_choose_from_fails(
    instance: Callable[..., RoleInstance], num_banned: int
) -> None:
    both, allowed = instance(), tuple(range(10, 16))
    banned = tuple((token,) for token in allowed[:num_banned])
    sampling = SamplingParams(
        max_tokens=1, beam_width=2, num_answers=2, ignore_eos=True, allowed_token_ids=allowed, bad_words=banned
    )
    (job,) = both.submit_choices(pb.BOTH, [1, 2, 3], sampling, 1)
    both.run()
    output = job.output
    assert output is not None and job.ended
    if num_banned == 5:  # with 6, no other token would be left, and they are allowed
        assert (
            output.error is not None
            and output.error.kind == "too_few_answers"
            and "found 1 of 2 answers" in output.error.message
        )
        assert not output.hypotheses and not output.finish_reason
    else:
        assert len(output.hypotheses) == 2 and output.finish_reason == "stop"
        assert all(math.isfinite(answer.score) for answer in output.hypotheses)
    both.end_all()
    both.check_nothing_is_held()
