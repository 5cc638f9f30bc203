"""Speculation over HTTP: answers of every kind are the same with it and without, on instances of every role."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve import logits_processors, plugins
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Drafter, StepPlan
from pdserve.keys import KEY_BYTES, KeyChain, root_key, token_array
from pdserve.kv_transfer.header import HEADER_BYTES, NAME
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from tests.outputs import is_stored

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 5, "n": 3, "logprobs": 2},
    {"temperature": 0.3, "seed": 6, "top_p": 0.7, "frequency_penalty": 0.2},
    {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"temperature": 0, "ignore_eos": True, "stop": ["aa", "\n", "e"]},
    {"temperature": 0, "ignore_eos": True, "logit_bias": {"97": 3, "98": 3}, "logprobs": 1},
    {"beam_width": 2, "use_beam_search": True, "n": 2, "temperature": 0},
]
ACCEPTED = "spec_decode_num_accepted_tokens"
PROMPTS = [[97, 98, 99, 100] * 12, [97] * 40, [10, 20, 30, 10, 20, 30, 10, 20], list(range(60)) * 3]


@pytest.fixture(scope="module")
def answers() -> list[list[Any]]:
    """The answers of each fleet. Those of the first one, without drafts, are right in all roles."""
    return []


@pytest.mark.parametrize(
    ("roles", "flags"),
    [
        ({"prefill": 1, "decode": 1}, ["--speculate", "suffix", "--speculative-tokens", "4"]),
        ({"prefill": 0, "decode": 0, "both": 1}, ["--speculate", "auto"]),
        ({"prefill": 1, "decode": 1}, ["--speculative-tokens", "3", "--speculate", "draft", "--speculative-model"]),
    ],
    ids=["split", "both", "draft"],
)
def test_answers_over_http(
    roles: dict[str, int],
    flags: list[str],
    checkpoint: Callable[..., Path],
    deploy: Callable[..., Any],
    complete: Callable[..., dict[str, Any]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    tmp_path: Path,
    answers: list[list[Any]],
) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 40, **kind} for prompt in PROMPTS for kind in KINDS]
    role = "both" if "both" in roles else "decode"
    if "draft" in flags:  # in a folder whose path is longer than what a router takes in a Hello
        path = tmp_path / ("folder" * 40) / "small\n"
        path.parent.mkdir()
        path.symlink_to(checkpoint("llama", dtype="bfloat16"))
        flags = [*flags, str(path)]
    for extra in (flags,) if answers else (["--speculate", "off"], flags):
        with deploy(model=str(checkpoint("llama", dtype="bfloat16")), flags={role: extra}, **roles) as deployment:
            with ThreadPoolExecutor(8) as threads:
                replies = [*threads.map(lambda body: complete(deployment, **body), bodies)]
            answers.append([(reply["choices"], reply["usage"]["completion_tokens"]) for reply in replies])
            wait_until(lambda: metric(deployment, "kv_cache_blocks_held", role=role) == 0, "no block is held")
            if "auto" not in extra:  # what that drafts depends on the machine's times
                assert (metric(deployment, f"{ACCEPTED}_total", role=role) > 0) == (extra == flags)
            if "draft" in extra:  # a prompt of 180 tokens takes two steps of the draft model
                assert metric(deployment, "spec_decode_num_without_drafts_total", role=role, reason="behind") > 0
                instances = httpx.get(f"{deployment.url}/debug/instances").json()["instances"]
                shown = {one["role"]: (one["speculate"], all(one["drafts"].values())) for one in instances}
                assert shown == {"prefill": ("auto", False), "decode": ("draft small", True)}
            assert metric(deployment, "kv_transfer_failures_total") == 0

            def is_sum() -> bool:
                parts = (metric(deployment, f"{ACCEPTED}{which}_total", role=role) for which in ("", "_per_pos"))
                return len({*parts}) == 1

            wait_until(is_sum, "those of each position, unless a heartbeat comes between the two")
    for body, one, other in zip(bodies, answers[0], answers[-1], strict=True):
        assert one == other, body


FAILING = """
def make(arguments):
    def process(prompt, output, logits_V):
        if len(output) == arguments["after"]:
            raise RuntimeError("broken")
    return process
"""


class Known(Drafter):
    """Proposes four tokens of a known answer, of which some are changed by `change`."""

    def __init__(self, answer: list[int], change: Callable[[int], int] = lambda at: 0) -> None:
        self._answer = [token ^ change(at) for at, token in enumerate(answer)]

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        return {
            seq: self._answer[(at := seq.output.num_generated) : at + 4]
            for seq in plan.counts
            if plan.takes_drafts(seq)
        }


@pytest.mark.parametrize("stays", ["whole", "moves"])
@pytest.mark.parametrize("wrong_every", [1, 3])
def test_no_key_in_the_store_is_of_a_token_that_was_not_accepted(
    wrong_every: int,
    stays: str,
    make_instance: Callable[..., Any],
    checkpoint: Callable[..., Path],
    controlled_store: Callable[..., Any],
) -> None:
    """Every stored key is that of a block of prompt and answer, and the KV in it is what is computed without drafts."""
    prompt, size, kept = [*range(20)], 100, []
    expected: list[int] = []
    for drafts in (False, True):
        store = controlled_store()
        driver = make_instance(
            store,
            model=str(checkpoint("llama", dtype="bfloat16")),
            num_blocks=64,
            store_generated="on",
            speculate="off",
        )
        if drafts:
            driver.instance.engine.drafter = Known(expected, lambda at: at % wrong_every == 0)
        if stays == "whole" or not drafts:
            driver.submit("whole", prompt, size, pb.BOTH)
        else:
            driver.submit("first", prompt, size, pb.BOTH)
            driver.run_until(lambda outputs: sum(len(one.token_ids) for one in outputs) > 50)
            driver.instance.cancel("router", "first")
            driver.submit("whole", prompt, size, pb.BOTH, output=driver.tokens("first"))
        driver.instance.run_once(wait=True)
        driver.run_until_idle()
        tokens = driver.tokens("first") + driver.tokens("whole")
        assert not expected or tokens == expected
        expected = tokens
        kept.append({value[NAME][-KEY_BYTES:]: value[HEADER_BYTES:] for value in store.values.values()})
    whole = token_array([*prompt, *expected])
    ends = range(driver.instance.engine.pool.block_size, len(whole), driver.instance.engine.pool.block_size)
    root = root_key(model_digest=driver.instance.engine.layout.model_digest)
    assert kept[1].keys() <= {*KeyChain(root).keys(whole, ends)} and len(kept[1]) == len(ends)
    assert kept[0] == kept[1]


def test_a_request_that_fails_has_the_tokens_before_that(
    make_instance: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "failing_plugin.py").write_text(FAILING)
    info = tmp_path / "failing_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{logits_processors.ENTRY_POINT_GROUP}]\nfail = failing_plugin:make\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.names.cache_clear()
    driver = make_instance(model=str(checkpoint("llama", dtype="bfloat16")), num_blocks=64, connector="memory://")
    prompt, size = [*range(20)], 24
    driver.submit("whole", prompt, size, pb.BOTH)
    driver.run_until(lambda outputs: bool(outputs) and outputs[-1].finish_reason is not None)
    expected = driver.tokens("whole")
    steps = {}
    for drafter in (None, Known(expected)):
        driver.instance.engine.drafter = drafter
        for after in range(1, 8):
            spec = json.dumps({"fail": {"after": after}})
            sampling = SamplingParams(
                temperature=0, max_tokens=size, ignore_eos=True, logits_processors=spec, logprobs=0
            )
            name = f"{after} {drafter is None}"
            request = Request(prompt=prompt, sampling=sampling).pack()
            driver.instance.submit("router", pb.Submit(request_id=name, phase=pb.BOTH, request=request))
            driver.instance.run_once(wait=True)
            driver.run_until_idle()
            assert driver.tokens(name) == expected[:after], "the error comes behind them"
            mine = [output for output in driver.outputs if output.request_id == name]
            *before, last = [output for output in mine if output.token_ids or output.error]
            assert (
                sum(len(output.logprobs) for output in before) == after
                and last.error
                and "broken" in last.error.message
            )
            steps[name] = len(before)
    assert steps["7 False"] < steps["7 True"], "several tokens came at once"
    plugins.names.cache_clear()


def drafts(driver: Any) -> tuple[float, float]:
    """Return how many tokens an instance has drafted, and how many of them were accepted."""
    counts = driver.instance.reporter.counts
    return counts["spec_decode_num_draft_tokens"], counts["spec_decode_num_accepted_tokens"]


def ended(outputs: list[Output]) -> bool:
    return any(output.finish_reason for output in outputs)


@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.slow), "suffix", "draft"])
def test_drafts_are_the_same_after_a_hand_over_and_as_good_after_a_move(
    method: str,
    make_instance: Callable[..., Any],
    checkpoint: Callable[..., Path],
    controlled_store: Callable[..., Any],
) -> None:
    """Compares counts: the tokens of each step, drafts and accepted ones."""
    path, values = str(checkpoint("llama", dtype="bfloat16")), dict[str, bytes]()
    prompt, size = [5, 6, 7, 8] * 5 + [*range(40, 60)], 300

    def make() -> Any:
        settings = {"num_blocks": 200, "speculate": method, "speculative_tokens": 4, "speculative_model": model}
        return make_instance(controlled_store(values=values), model=path, **settings)

    model = str(checkpoint("llama", seed=1)) if method == "draft" else ""
    sampling = SamplingParams(temperature=0.4, seed=3, max_tokens=size, ignore_eos=True, allowed_token_ids=(4, 5, 6))

    def submit(driver: Any, phase: Any, output: list[int] | None = None) -> None:
        request = Request(prompt=prompt, sampling=sampling).pack()
        driver.instance.submit("router", pb.Submit(request_id="r", phase=phase, request=request, output=output or []))

    whole, prefill, decode, moved = make(), make(), make(), make()
    submit(whole, pb.BOTH)
    whole.run_until(lambda outputs: len(whole.tokens("r")) > size // 3)
    at_move, first = drafts(whole), whole.tokens("r")
    whole.run_until(ended)
    submit(prefill, pb.PREFILL)
    prefill.run_until(lambda outputs: any(map(is_stored, outputs)))
    submit(decode, pb.DECODE)
    decode.instance.hand_over("router", pb.HandOver(request_id="r", num_blocks=3, final=True, first_token=first[0]))
    decode.run_until(ended)
    steps, others = ([len(one.token_ids) for one in driver.outputs if one.token_ids] for driver in (whole, decode))
    assert steps == [1, *others] and drafts(whole) == drafts(decode)
    submit(moved, pb.BOTH, first)
    moved.run_until(ended)
    assert first + moved.tokens("r") == whole.tokens("r")
    drafted, accepted = (end - begin for begin, end in zip(at_move, drafts(whole), strict=True))
    drafted_there, accepted_there = drafts(moved)
    assert 0 < accepted < drafted and abs(accepted / drafted - accepted_there / drafted_there) < 0.02


class Pondering(Drafter):
    """Proposes nothing, which takes it an hour."""

    seconds = 3600.0

    def propose(self, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        return {}


def test_the_cost_model_leaves_out_what_drafting_takes(
    make_instance: Callable[..., Any], checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_instance(model=str(checkpoint("llama")), num_blocks=64, connector="memory://", speculate="off")
    driver.instance.engine.drafter = Pondering()
    seconds = list[float]()
    monkeypatch.setattr(driver.instance.reporter.meter, "record_step", lambda work, is_read, s, now: seconds.append(s))
    driver.submit("a", [1, 2, 3], 4, pb.BOTH)
    driver.instance.run_once(wait=True)
    driver.run_until_idle()
    assert len(seconds) == 4 and max(seconds) < 0
