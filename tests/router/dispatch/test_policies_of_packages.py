"""Policies of other packages: what they get wrong costs no stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.output import Stored

if TYPE_CHECKING:
    from tests.router.dispatch.conftest import Cluster


@pytest.mark.parametrize(
    "answer",
    [
        "raise KeyError('decode-9')",
        "return []",
        "return None",
        "return [(float('inf'), one) for one in candidates]",
        "return [(one, 1.0) for one in candidates]",
        "return [(1.0, one.instance_id) for one in candidates]",
        "return [(1.0, type(candidates[0])('decode-9'))]",
    ],
)
def test_a_policy_of_another_package_that_fails_ends_no_stream(
    answer: str,
    make_cluster: type[Cluster],
    package_folder: Path,
    install_connectors: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = package_folder / "source.py"
    source.write_text(
        "def first(candidates, request):\n"
        "    if len(candidates) == 3:\n"
        "        return list(enumerate(candidates))\n"
        f"    {answer}\n"
    )
    install_connectors(package_folder, "first_package", source, {"first": "first"}, group="pdserve.policies")
    cluster = make_cluster("prefill", "decode", "decode", "decode", decode_policy="first")
    prefill, decode, *others = cluster.instances
    states = [cluster.open(name) for name in ("a", "b")]
    assert [state.decode for state in states] == [decode, decode]
    for state in states:
        cluster.deliver(prefill, state.id, token_ids=[7], stored=Stored(num_blocks=1, final=True))
    cluster.fleet.deregister(decode, "test")
    for state in states:
        assert state.decode in others
        cluster.deliver(state.prefill, state.id, token_ids=[8], stored=Stored(num_blocks=1, final=True))
        cluster.deliver(state.decode, state.id, token_ids=[9, 10], finish_reason="length")
        assert cluster.tokens(state) == [7, 8, 9, 10]
        decision = next(found for role, found in reversed(state.timeline.decisions) if role == "decode")
        assert decision.policy == "least_loaded" and decision.why.startswith("the policy first failed: ")
    assert "the policy first failed: " in caplog.text
    assert "raise" not in answer or "first_package.py" in caplog.text, "its author finds the line"
