"""Random sequences of connector calls, compared with a dict."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.kv_transfer.connector import Outcome
from pdserve.kv_transfer.connectors.shm import connector as shm

Attach = Callable[..., Any]

KEYS = [bytes([n]) * 16 for n in range(10)]
some_keys = st.lists(st.sampled_from(KEYS), max_size=8)
calls = st.lists(
    st.tuples(st.sampled_from(["store", "load", "match", "release"]), some_keys, st.randoms()), max_size=25
)


@pytest.mark.parametrize("scheme", ["memory", "shm", "file"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=calls)
def test_a_connector_behaves_like_a_dict(
    attach: Attach, tmp_path: Path, scheme: str, calls: list[tuple[str, list[bytes], Any]]
) -> None:
    name = f"test-{uuid.uuid4().hex}"
    url = {"memory": f"memory://{name}", "shm": f"shm://{name}?size=1MiB", "file": f"file://{tmp_path}/{name}"}[scheme]
    instance = attach(url)
    try:
        check(instance, calls)
    finally:
        instance.connector.close()
        shm.unlink(f"shm://{name}")


def check(instance: Any, calls: list[tuple[str, list[bytes], Any]]) -> None:
    stored: dict[bytes, bytes] = {}
    for call, keys, rng in calls:
        ids = rng.sample(range(16), len(keys))
        if call == "store":
            for key, row in zip(keys, ids, strict=True):
                instance.rows[row] = KEYS.index(key)  # equal bytes for equal keys
                stored[key] = instance.rows[row].tobytes()
            assert instance.store(keys, ids).outcomes == [Outcome.OK] * len(keys)
        elif call == "load":
            instance.rows[:] = 255
            expected = [Outcome.OK if key in stored else Outcome.MISSING for key in keys]
            assert instance.load(keys, ids).outcomes == expected
            for key, row in zip(keys, ids, strict=True):
                if key in stored:
                    np.testing.assert_array_equal(instance.rows[row], np.frombuffer(stored[key], np.uint8))
        elif call == "match":
            leading = next((i for i, key in enumerate(keys) if key not in stored), len(keys))
            assert instance.match(keys) == leading
        else:
            instance.connector.release(keys)
