"""Masks of workers: those that are computed here, what becomes of a grammar whose masks take too long, and who waits."""

import json
import os
import random
import shutil
import signal
import socket
import string
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.errors import RequestError
from pdserve.grammars import compiler as compiler_module
from pdserve.grammars import mask_client, mask_turns
from pdserve.grammars.compile_server import Loaded
from pdserve.grammars.compiler import GrammarCompiler
from pdserve.grammars.formats import specified, tag
from pdserve.grammars.limits import CompileLimits, GrammarTooComplex
from pdserve.grammars.mask_client import Budget, Follower, LoadedGrammar, MaskService
from pdserve.grammars.mask_worker import LENGTH_BYTES, LOADED, new_matcher
from pdserve.grammars.specification import lark_grammar
from pdserve.keys import token_array
from pdserve.priority import NICENESS
from pdserve.request import NO_TENANT, Tenant

SPECS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"enum": ["x", 5]}, "b": {"type": "number"}}, "required": ["a"]}},
    {"regex": r"[ab]{3,7}-\d{4}"},
    {"choice": ["Paris", 'Bonn "am\nRhein" é']},
    {"grammar": 'root ::= "x" | "(" inner ")"\ninner ::= "y" | "[z]"'},
    {"format": tag("<tool_call>\n", specified({"json": {"type": "boolean"}}), "\n</tool_call>")},
]
# After `Q`, letters may be grouped in any way, so that the time for each token grows with the square of their number; all
# masks before take milliseconds.
BOMB = {"grammar": 'root ::= [a-z]{600} "Q" s\ns ::= s s s | s s | [a-z]'}
NUM_WORDS = 20_000


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has many long words, as those of real models have."""
    folder = tmp_path_factory.mktemp("words") / "model"
    shutil.copytree(checkpoint("llama"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab, choose = tokenizer["model"]["vocab"], random.Random(0).choices
    while len(vocab) < NUM_WORDS:
        vocab.setdefault("".join(choose(string.ascii_lowercase, k=8)), len(vocab))
    tokenizer["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def vocab(model: Path) -> dict[str, int]:
    ids: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return ids


@pytest.fixture(scope="module")
def compiler(model: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(str(model), NUM_WORDS, [0], CompileLimits(cpu_s=600, elapsed_s=600))
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def local_mask(model: Path) -> Callable[[dict[str, Any], list[int]], torch.Tensor]:
    """Computes the mask of a grammar after an output in this process."""
    loaded = Loaded(str(model), NUM_WORDS, [0])

    def compute(spec: dict[str, Any], output: list[int]) -> torch.Tensor:
        matcher = new_matcher(loaded.tokenizer, lark_grammar(spec, loaded.special))
        assert all(map(matcher.consume_token, output))
        words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        return words[: NUM_WORDS // 32]

    return compute


@pytest.fixture(scope="module")
def masks() -> MaskService:
    return MaskService()


def load(compiler: GrammarCompiler, spec: dict[str, Any], tenant: Tenant = NO_TENANT) -> LoadedGrammar:
    return LoadedGrammar(compiler, json.dumps(spec), tenant)


def follow(compiler: GrammarCompiler, spec: dict[str, Any]) -> Follower:
    return Follower(load(compiler, spec))


def fill(masks: MaskService, *wanted: tuple[Follower, list[int]]) -> None:
    """Wait for the masks behind whole outputs, of which sequences have had a part before."""
    for follower, output in wanted:
        assert follower.output.tolist() == output[: len(follower.output)]
        masks.follow(follower, token_array(output[len(follower.output) :]))
    masks.wait([follower for follower, _ in wanted], 600)


def as_tensor(mask: bytes | None) -> torch.Tensor:
    assert mask is not None
    return torch.frombuffer(bytearray(mask), dtype=torch.int32)


def allowed(mask: bytes | None) -> list[int]:
    assert mask is not None
    bits = int.from_bytes(mask, "little")
    return [i for i in range(NUM_WORDS) if bits >> i & 1]


def newest_worker(compiler: GrammarCompiler) -> int:
    """Return the process id of the worker that was started last."""
    children = Path(f"/proc/{compiler.server_pid}/task/{compiler.server_pid}/children").read_text()
    return int(children.split()[-1])


def test_masks_are_those_that_are_computed_in_this_process(
    compiler: GrammarCompiler, masks: MaskService, local_mask: Callable[[dict[str, Any], list[int]], torch.Tensor]
) -> None:
    choose = random.Random(1).choice
    followers, outputs = [follow(compiler, spec) for spec in SPECS], [list[int]() for _ in SPECS]
    for _ in range(30):
        fill(masks, *(one for one in zip(followers, outputs, strict=True) if 0 not in one[1]))
        for spec, follower, output in zip(SPECS, followers, outputs, strict=True):
            assert follower.failure is None
            if 0 not in output:
                assert torch.equal(as_tensor(follower.mask), local_mask(spec, output))
                output.append(choose(allowed(follower.mask)))
    assert masks.cpu_s > 0


def test_masks_behind_drafts_are_those_of_outputs_that_have_them(
    compiler: GrammarCompiler, masks: MaskService, local_mask: Callable[[dict[str, Any], list[int]], torch.Tensor]
) -> None:
    choose = random.Random(2).choice
    for spec in SPECS:
        follower, output = follow(compiler, spec), list[int]()
        other = Follower(follower.grammar)  # whose masks come behind those of the drafts
        while len(output) < 8 and 0 not in output:
            fill(masks, (follower, output))
            drafts, expected = [choose(allowed(follower.mask))], list[torch.Tensor]()
            while drafts[-1]:
                expected.append(local_mask(spec, output + drafts))
                if len(drafts) == 3:
                    break
                drafts.append(choose(allowed(expected[-1].numpy().tobytes())))
            masks.try_out(follower, [*drafts, NUM_WORDS - 1])
            fill(masks, (other, output))
            assert len(follower.behind_drafts) >= len(expected)
            assert all(map(torch.equal, map(as_tensor, follower.behind_drafts), expected))
            output.append(drafts[0])
        assert follower.failure is None


def test_a_mask_that_takes_too_long_fails_its_sequence_only(
    compiler: GrammarCompiler,
    masks: MaskService,
    vocab: dict[str, int],
    local_mask: Callable[[dict[str, Any], list[int]], torch.Tensor],
) -> None:
    bomb, other = follow(compiler, BOMB), follow(compiler, SPECS[1])
    goods = [other, Follower(bomb.grammar)]
    output, good_outputs = [vocab["a"]] * 600, [[vocab["a"]] * 3, [vocab["a"]] * 2]
    fill(masks, (bomb, output), *zip(goods, [[vocab["a"]] * 2, [vocab["a"]]], strict=True))
    assert bomb.failure is None
    given_up = masks.num_given_up
    long = [*output, vocab["Q"], *[vocab["a"]] * 800]
    fill(masks, (goods[0], good_outputs[0]), (bomb, long), (goods[1], good_outputs[1]))
    assert isinstance(bomb.failure, GrammarTooComplex) and "takes more than 0.25 s of CPU time" in str(bomb.failure)
    assert masks.num_given_up == given_up + 1
    for good, spec, good_output in zip(goods, (SPECS[1], BOMB), good_outputs, strict=True):
        assert good.failure is None and torch.equal(as_tensor(good.mask), local_mask(spec, good_output))


def test_drafts_whose_masks_take_too_long_fail_no_sequence(
    compiler: GrammarCompiler, masks: MaskService, vocab: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = follow(compiler, BOMB)
    output = [*[vocab["a"]] * 600, vocab["Q"]]
    fill(masks, (bomb, output))
    assert bomb.failure is None
    spent = bomb.budget.cpu_s
    with monkeypatch.context() as patch:
        patch.setattr(mask_client, "MAX_MASK_CPU_S", 0.005)  # reached soon: up to 0.25 s, all take a minute
        masks.try_out(bomb, [vocab["a"]] * 900)
    other = Follower(bomb.grammar)
    fill(masks, (other, output[:1]))
    assert len(bomb.behind_drafts) < 900 and (bomb.failure, other.failure, bomb.budget.cpu_s) == (None, None, spent)


def test_choices_of_a_request_share_what_their_masks_may_take(
    compiler: GrammarCompiler, masks: MaskService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_client, "mask_budget_s", lambda num_tokens: 1e9 if num_tokens <= 6 else -1.0)
    grammar, budget = load(compiler, SPECS[1]), Budget()
    choices = [Follower(grammar, budget) for _ in range(4)]
    fill(masks, *((choice, []) for choice in choices))
    assert [choice.failure for choice in choices] == [None] * 4 and budget.num_tokens == 4
    token = allowed(choices[0].mask)[0]
    fill(masks, *((choice, [token]) for choice in choices))
    failures = [choice.failure for choice in choices]
    assert all(isinstance(failure, GrammarTooComplex) for failure in failures[2:])
    assert str(failures[-1]).endswith("s of CPU time for 8 tokens; simplify it")


def test_the_masks_of_one_tenant_do_not_wait_for_those_of_another(compiler: GrammarCompiler) -> None:
    arrived = threading.Event()
    masks, late, stopped = MaskService(arrived.set), list[Follower](), list[int]()
    try:
        for _ in range(5):  # workers as many as may compute at once, and more
            late.append(Follower(load(compiler, SPECS[0], Tenant(1))))
            stopped.append(newest_worker(compiler))
            os.kill(stopped[-1], signal.SIGSTOP)
            masks.follow(late[-1], token_array([]))
        innocent = Follower(load(compiler, SPECS[0], Tenant(2)))
        fill(masks, (innocent, []))
        masks.wait(late, 0.01)
        masks.notify(late)
        assert innocent.mask is not None and all(one.is_late for one in late) and not arrived.is_set()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert arrived.wait(600)
    masks.wait(late, 600)
    assert {one.mask for one in late} == {innocent.mask}
    arrived.clear()
    masks.notify(late)
    assert arrived.is_set(), "it calls at once if masks are there already"


def test_models_go_before_a_tenant_whose_masks_take_much(
    compiler: GrammarCompiler, vocab: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its masks is slow. The masks of others are as quick as before."""
    monkeypatch.setattr(mask_turns, "SHARE", 0.0)
    monkeypatch.setattr(mask_turns, "BURST_S", 0.0)
    masks, normal = MaskService(), os.nice(0)
    for tenant, count, expected in ((Tenant(1), 200, min(19, normal + NICENESS)), (Tenant(2), 1, normal)):
        grammar = load(compiler, SPECS[1], tenant)
        pid = newest_worker(compiler)
        while count and os.getpriority(os.PRIO_PROCESS, pid) == normal:
            fill(masks, (Follower(grammar), [vocab["a"]]))
            count -= 1
        assert os.getpriority(os.PRIO_PROCESS, pid) == expected


def test_slow_masks_get_the_lowest_priority(
    compiler: GrammarCompiler, masks: MaskService, vocab: dict[str, int]
) -> None:
    """Each is quick enough for its limit, and takes longer than the one before."""
    bomb, output = follow(compiler, BOMB), [*[vocab["a"]] * 600, vocab["Q"]]
    pid = newest_worker(compiler)
    while os.getpriority(os.PRIO_PROCESS, pid) < 19:
        output.append(vocab["a"])
        fill(masks, (bomb, output))
        assert bomb.failure is None


def test_a_dead_worker_is_replaced(compiler: GrammarCompiler, masks: MaskService) -> None:
    follower = follow(compiler, SPECS[1])
    fill(masks, (follower, []))
    token = allowed(follower.mask)[0]
    worker = newest_worker(compiler)
    compiler.compile(json.dumps(SPECS[0]))  # so the compile server has closed its end of the worker's connection
    os.kill(worker, signal.SIGKILL)
    while Path(f"/proc/{worker}").exists():
        time.sleep(0.01)
    fill(masks, (follower, [token]))
    assert follower.failure is None and follower.mask is not None


class Losing(GrammarCompiler):
    """A compiler whose first workers end as if they were killed, or hang, each while it loads or at the first mask."""

    def __init__(self, model: Path, ends: list[str]) -> None:
        super().__init__(str(model), NUM_WORDS, [0], CompileLimits(cpu_s=600, elapsed_s=600))
        self.ends = ends

    def fork_mask_worker(self) -> tuple[socket.socket, int]:
        if not self.ends:
            self.limits = replace(self.limits, elapsed_s=600)
            return super().fork_mask_worker()
        ours, theirs = socket.socketpair()
        self.limits = replace(self.limits, elapsed_s=1 if self.ends[0] == "hangs" else 600)
        threading.Thread(target=self._serve, args=(theirs, self.ends.pop(0))).start()
        return ours, 1 << 30  # no process

    def _serve(self, connection: socket.socket, end: str) -> None:
        with connection, connection.makefile("rb") as stream:
            stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "big"))
            if end == "hangs":
                stream.read()
            if end == "at a mask":
                connection.sendall(LOADED)
                stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "big"))


@pytest.mark.parametrize("end", ["while it loads", "at a mask", "hangs"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_that_ends_for_no_limit_is_replaced_once(
    model: Path, local_mask: Callable[[dict[str, Any], list[int]], torch.Tensor], end: str, times: int
) -> None:
    """Such as one that the kernel kills for lack of memory. No grammar is to blame: the request may be tried again."""
    compiler, masks, failure = Losing(model, [end] * times), MaskService(), None
    try:
        follower = follow(compiler, SPECS[1])
    except RequestError as error:
        failure = error
    else:
        fill(masks, (follower, []))
        failure = follower.failure
    if times == 1:
        assert failure is None and as_tensor(follower.mask).equal(local_mask(SPECS[1], []))
    else:
        assert failure is not None and failure.status == 500 and "try again" in str(failure)
    assert (compiler.num_workers_lost, masks.num_given_up) == (times, 0)
    compiler.close()


def test_a_worker_that_is_killed_over_a_mask_is_counted(compiler: GrammarCompiler) -> None:
    masks, follower, lost = MaskService(), follow(compiler, SPECS[1]), compiler.num_workers_lost
    fill(masks, (follower, []))
    worker = newest_worker(compiler)
    os.kill(worker, signal.SIGSTOP)
    masks.follow(follower, token_array([allowed(follower.mask)[0]]))
    os.kill(worker, signal.SIGKILL)
    masks.wait([follower], 600)
    assert follower.mask is not None and compiler.num_workers_lost == lost + 1


def test_a_worker_that_cannot_be_replaced_keeps_nobody_waiting(
    compiler: GrammarCompiler, masks: MaskService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as while there are as many processes as there may be."""

    def fail(*_: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    follower = follow(compiler, SPECS[1])
    fill(masks, (follower, []))
    token, worker, server = allowed(follower.mask)[0], newest_worker(compiler), compiler.server_pid
    assert server is not None
    os.killpg(server, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    while Path(f"/proc/{worker}").exists():
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(compiler_module, "start_process", fail)
        fill(masks, (follower, [token]))
        assert follower.failure is not None and follower.failure.kind == "internal_error"
    other = Follower(follower.grammar)
    fill(masks, (other, []))
    assert other.failure is None and other.mask is not None


@pytest.mark.parametrize("is_dead", [False, True])
def test_threads_that_cannot_be_started_end_sequences_and_not_the_engine(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    """Neither that which collects masks, nor that which replaces a worker."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    masks, follower, output = MaskService(), follow(compiler, SPECS[1]), list[int]()
    if is_dead:
        fill(masks, (follower, []))
        output, worker = [allowed(follower.mask)[0]], newest_worker(compiler)
        compiler.compile(json.dumps(SPECS[0]))  # so the compile server has closed its end of the worker's connection
        os.kill(worker, signal.SIGKILL)
        while Path(f"/proc/{worker}").exists():
            time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        fill(masks, (follower, output))
        assert follower.failure is not None and follower.failure.kind == "internal_error"
    other = Follower(follower.grammar)
    fill(masks, (other, []))
    assert other.failure is None and other.mask is not None


def test_a_worker_that_begins_with_drafts_knows_the_output_before_them(
    compiler: GrammarCompiler,
    masks: MaskService,
    vocab: dict[str, int],
    local_mask: Callable[[dict[str, Any], list[int]], torch.Tensor],
) -> None:
    """The worker that had followed the output was killed, as over another sequence's mask."""
    spec, output, draft = SPECS[1], [vocab["a"], vocab["b"]], vocab["a"]
    follower = follow(compiler, spec)
    fill(masks, (follower, output))
    worker = newest_worker(compiler)
    compiler.compile(json.dumps(SPECS[0]))  # so the compile server has closed its end of the worker's connection
    os.kill(worker, signal.SIGKILL)
    while Path(f"/proc/{worker}").exists():
        time.sleep(0.01)
    masks.try_out(follower, [draft])
    fill(masks, (Follower(follower.grammar), []))  # behind those of the drafts
    expected = local_mask(spec, [*output, draft])
    assert as_tensor(follower.behind_drafts[0]).equal(expected)
    fill(masks, (follower, [*output, draft]))
    assert follower.failure is None and as_tensor(follower.mask).equal(expected)


def test_sequences_that_have_ended_are_forgotten(compiler: GrammarCompiler, masks: MaskService) -> None:
    follower = follow(compiler, SPECS[1])
    for _ in range(5):
        follower = Follower(follower.grammar)
        fill(masks, (follower, []))
        assert follower.worker is not None and len(follower.worker._ended) <= 1


def test_masks_go_on_without_the_compile_server(compiler: GrammarCompiler, masks: MaskService) -> None:
    follower = follow(compiler, SPECS[1])
    fill(masks, (follower, []))
    assert compiler.server_pid is not None
    token = allowed(follower.mask)[0]
    os.killpg(compiler.server_pid, 9)
    fill(masks, (follower, [token]))
    assert follower.failure is None
