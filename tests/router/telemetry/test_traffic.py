"""Recent traffic as a trace: what a router writes, `pdserve.tools.bench.traces` reads."""

import json
from pathlib import Path

from pdserve.keys import block_keys, root_key
from pdserve.lifetime import Stage
from pdserve.router.telemetry.timeline import BLOCK, Timeline, prompt_ids
from pdserve.router.telemetry.traffic import traffic_lines
from pdserve.tools.autoscaler.observation import parse_traffic
from pdserve.tools.bench.traces import read_mooncake

ROOT = root_key(model_digest=b"m")


def timeline(name: str, received: float, prompt: list[int], size: int = 16) -> Timeline:
    block, ids = prompt_ids({size: block_keys(ROOT, prompt, size)})
    one = Timeline(name, prompt_tokens=len(prompt), output_tokens=7, prompt_block=block, prompt_ids=ids)
    one.stamps = {Stage.RECEIVED: received, Stage.FIRST_TOKEN: received + 0.25}
    return one


def test_a_trace_of_the_traffic_has_its_shared_prefixes(tmp_path: Path) -> None:
    shared = list(range(3 * BLOCK))
    timelines = [timeline("b", 12.5, [*shared, 9, 9]), timeline("a", 11.0, shared + [8] * 300)]
    path = tmp_path / "traffic.jsonl"
    path.write_text(traffic_lines(timelines, epoch_offset=1000.0))
    first, second = read_mooncake(str(path), 10, 1.0, conversations=False)
    assert (first.at, second.at) == (1011.0, 1012.5) and first.output_tokens == 7
    assert (first.input_tokens, second.input_tokens) == (len(shared) + 300, len(shared) + 2)
    assert first.blocks[:3] == second.blocks[:3] and first.blocks[3:] != second.blocks[3:]
    assert [size for _, size in second.blocks] == [BLOCK, BLOCK, BLOCK, 2]


def test_rows_say_what_clients_saw() -> None:
    one, waiting = timeline("a", 1.0, [1]), Timeline("w", prompt_tokens=4, stamps={Stage.RECEIVED: 2.0})
    one.itl_p99_s, one.finish_reason, one.stamps[Stage.FINISHED] = 0.02, "length", 1.4
    rows = [json.loads(line) for line in traffic_lines([waiting, one, Timeline("unborn")], 0.0).splitlines()]
    assert [(row["request_id"], row["ttft_ms"], row["itl_p99_ms"], row["finish_reason"]) for row in rows] == [
        ("a", 250.0, 20.0, "length"),
        ("w", None, None, ""),
    ]
    assert json.loads(traffic_lines([waiting, one], 0.0, since=1.5))["request_id"] == "w"


def test_requests_of_the_admission_queue_are_demand_that_waits() -> None:
    lines = traffic_lines([timeline("a", 1.0, [1])], 100.0, queued=[(0.5, 30), (2.0, 30)])
    first, received, second = parse_traffic(lines)
    assert (first.at, received.at, second.at) == (100.5, 101.0, 102.0) and first.ttft_s is None
    assert first.request.input_tokens == 30 and first.request.blocks != second.request.blocks
    assert first.sample(103.0) is not None


def test_ids_stand_for_whole_blocks_of_any_size() -> None:
    prompt = list(range(1100))
    assert prompt_ids({}) == (BLOCK, b"")
    for size, expected in ((16, BLOCK), (64, 64), (512, 512)):
        block, ids = prompt_ids({size: block_keys(ROOT, prompt, size), 2048: []})
        assert (block, len(ids) // 4) == (expected, 1100 // expected)
    assert prompt_ids({16: block_keys(ROOT, prompt, 16)}) == prompt_ids({64: block_keys(ROOT, prompt, 64)})
