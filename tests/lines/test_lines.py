"""Lines of JSON and server-sent events: they end at line feeds only, and nothing else reads them."""

import ast
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.lines.event_stream import EventReader, read_events
from pdserve.lines.json_lines import json_lines

ROOT = Path(__file__).parents[2]
SOURCES = (
    "pdserve",
    "router",
    "decode",
    "prefill",
    "kv_transfer",
    "kernels",
    "benchmarks",
    "scripts",
    "examples",
    "deploy",
)
# Files that split what is no JSON: messages of errors, output of programs, files of Linux.
MAY_SPLIT = {
    *("pdserve/cli/gpus.py", "pdserve/engine/checkpoint_loader.py", "pdserve/engine/gpu/cuda_graph.py"),
    *("pdserve/engine/parallel/rank_group.py", "pdserve/instance/gpu_fault.py", "pdserve/launchers/compose.py"),
    *("pdserve/launchers/ray_actor.py", "benchmarks/gpu_kernels.py", "benchmarks/gpu_transfers.py"),
    *("benchmarks/report.py", "benchmarks/leftovers.py", "benchmarks/structured.py"),
    *(
        "scripts/gpu_session.py",
        "scripts/interop/lm_eval.py",
        "pdserve/grammars/schema_keywords.py",
        "pdserve/grammars/mask_worker.py",
        "kernels/native.py",
        "scripts/interop/smg.py",
    ),
}
# In every run some have what `str.splitlines` takes for the end of a line.
TEXTS = st.text() | st.text(st.sampled_from("a\u2028\u2029\x85\x0b\x0c\x1c\x1e\r"))
VALUES = st.dictionaries(TEXTS, TEXTS | st.integers(), min_size=1)


@given(st.lists(VALUES), st.sampled_from(["\n", "\r\n"]))
def test_json_lines(values: list[dict[str, object]], end: str) -> None:
    text = "".join(json.dumps(value, ensure_ascii=False) + end for value in values)
    assert [json.loads(line) for _, line in json_lines(text)] == values
    assert [number for number, _ in json_lines("\n" + text)] == [2 + i for i in range(len(values))]


@given(st.lists(VALUES), st.sampled_from(["\n", "\r\n"]), st.data())
def test_events_however_they_are_cut(values: list[dict[str, object]], end: str, data: st.DataObject) -> None:
    parts = [
        f": ping{end}{end}event: x{end}data: {json.dumps(value, ensure_ascii=False)}{end}{end}" for value in values
    ]
    body = "".join([*parts, f"data: [DONE]{end}{end}"]).encode()
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=20))
    pieces = [body[first:last] for first, last in pairwise([0, *sorted(cuts), len(body)])]
    *events, done = read_events(pieces)
    assert done == "[DONE]" and [json.loads(event) for event in events] == values


def test_an_event_without_an_end_is_none() -> None:
    assert EventReader().feed(b"data: 1\n\ndata: 2\n") == ["1"]


def _calls(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("splitlines", "iter_lines", "aiter_lines"):
            yield node.attr


@pytest.mark.parametrize("folder", SOURCES)
def test_sources_split_no_json_at_other_characters(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        allowed = {"splitlines"} if name in MAY_SPLIT else set()
        assert not set(_calls(path)) - allowed, f"{name}: read lines of JSON and events by pdserve.lines"
