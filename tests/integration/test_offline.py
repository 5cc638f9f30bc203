"""Offline use through the public calls: the same tokens as transformers, errors, and nothing left behind."""

import asyncio
import gc
import math
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from pdserve import LLM, AsyncLLM, LoRARequest, SamplingParams
from pdserve.cli.deployment import free_port
from pdserve.cli.supervisor import Supervisor
from pdserve.config import UpConfig
from pdserve.errors import PdserveError, SetupError
from pdserve.model_path import DEMO
from pdserve.offline import llm as module
from pdserve.offline.llm import Fleet
from tests.low_rank import make_adapter, merge

Generate = Callable[[Path, list[list[int]], int], list[list[int]]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
SMALL = {"num_blocks": 256, "threads": 1}


def children(parent: str = str(os.getpid())) -> set[str]:
    """Return the ids of a process's children that run pdserve; for a preloaded parent, those of its children besides."""
    found = set()
    for pid in {pid for file in Path(f"/proc/{parent}/task").glob("*/children") for pid in file.read_text().split()}:
        if b"pdserve" in (command := Path(f"/proc/{pid}/cmdline").read_bytes()):
            found |= {pid} | (children(pid) if b"pdserve.cli.fork_server" in command else set())
    return found


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if f"up-{os.getpid()}" in name}


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def llm(path: Path, fork_server: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Supervisor, "_spawn", lambda _, *command: fork_server.spawn(*command))
        colocated = LLM(str(path), **SMALL)
    with colocated:
        yield colocated


@pytest.fixture
def spawned(fork_server: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Processes that the test has started, in which nothing need be imported."""
    processes: list[Any] = []

    def spawn(_: Supervisor, *command: Any) -> Any:
        processes.append(fork_server.spawn(*command))
        return processes[-1]

    monkeypatch.setattr(Supervisor, "_spawn", spawn)
    return processes


def check_tokens(llm: LLM, path: Path, prompts: list[list[int]], generate: Generate) -> None:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == generate(path, prompts, 8)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output in outputs:
        [answer] = output.outputs
        assert output.finished and answer.finish_reason == "length" and answer.logprobs is not None
        assert [list(entry) for entry in answer.logprobs] == [[token] for token in answer.token_ids]
        total = sum(entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True))
        assert answer.cumulative_logprob is not None and math.isclose(total, answer.cumulative_logprob)


def test_colocated_equals_transformers(llm: LLM, path: Path, prompts: list[list[int]], generate: Generate) -> None:
    check_tokens(llm, path, prompts, generate)


def test_texts_chat_and_several_answers(llm: LLM) -> None:
    params = [SamplingParams(n=2, seed=1, max_tokens=4, ignore_eos=True), SamplingParams(max_tokens=2, ignore_eos=True)]
    first, second = llm.generate(["one", "two"], params)
    assert (first.prompt, second.prompt) == ("one", "two") and first.request_id != second.request_id
    assert [len(answer.token_ids) for answer in first.outputs] == [4, 4]
    assert [answer.index for answer in first.outputs] == [0, 1]
    assert len(second.outputs[0].token_ids) == 2
    conversation = [{"role": "user", "content": "hello"}]
    [alone] = llm.chat(conversation, GREEDY, use_tqdm=False)
    [same, _] = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert alone.outputs[0].token_ids == same.outputs[0].token_ids and len(alone.prompt_token_ids) > 5
    [scored] = llm.generate("abc", SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert scored.prompt_logprobs is not None and scored.prompt_logprobs[0] is None
    pairs = zip(scored.prompt_logprobs[1:], scored.prompt_token_ids[1:], strict=True)
    assert all(entry and token in entry for entry, token in pairs)


def test_what_is_not_valid(llm: LLM) -> None:
    invalid: list[dict[str, Any]] = [
        {"temperature": -1},
        {"n": 0},
        {"stop_token_ids": ["a"]},
        {"max_tokens": 0},
        {"max_tokens": None},
    ]
    for fields in invalid:
        with pytest.raises(ValueError, match=f"^{next(iter(fields))}.* must be "):
            SamplingParams(**fields)
    assert SamplingParams(seed=-1) != SamplingParams(seed=0), "a random one, as in vLLM"
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="2 prompts and 1 sampling"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="2 prompts and 0 sampling"):
        llm.generate(["a", "b"], [])
    with pytest.raises(ValueError, match="2 prompts and 1 priorities"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(ValueError, match=r"must be of the class SamplingParams, not \{'temperature': 0\}"):
        llm.generate("a", cast(Any, {"temperature": 0}))
    with pytest.raises(ValueError, match="prompt must be a text, not 5"):
        llm.generate({"prompt": 5})
    for ids in (5, ["a"], [[1, 2]], None):
        with pytest.raises(ValueError, match="prompt_token_ids must be a list of integers"):
            llm.generate({"prompt_token_ids": ids})
    with pytest.raises(ValueError, match="max_in_flight must be at least 1"):
        LLM(max_in_flight=0)
    with pytest.raises(ValueError, match="must not be empty"):
        llm.generate(["a", ""])
    with pytest.raises(ValueError, match="context"):
        llm.generate(["a", "a" * 2000], GREEDY, use_tqdm=False)


def test_arrays_of_token_ids(llm: LLM) -> None:
    arrays: list[Any] = [np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7), [np.int64(5), 6, 7]]
    outputs = llm.generate(({"prompt_token_ids": one} for one in arrays), iter([GREEDY] * 4), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[5, 6, 7]] * 4


def test_threads_call_at_once_and_print_nothing_on_stdout(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(3) as threads:
        outputs = list(threads.map(lambda _: llm.generate(["one", "two"], GREEDY), range(6)))
    assert len({output.outputs[0].text for _, output in outputs}) == 1
    printed = capfd.readouterr()
    assert not printed.out and "2/2" in printed.err


@pytest.mark.until_recorded("pdserve/offline", "pdserve/cli")  # with a parent of its own, which imports for seconds
def test_disaggregated_equals_transformers(path: Path, prompts: list[list[int]], generate: Generate) -> None:
    before = children(), segments()
    with LLM(str(path), prefill=1, decode=1, local_prefill_tokens=0, **SMALL) as llm:
        check_tokens(llm, path, prompts, generate)
        assert len(children() - before[0]) == 4 and segments() - before[1]
    assert (children(), segments()) == before
    llm.close()


def test_asynchronous(spawned: list[Any], path: Path, prompts: list[list[int]], generate: Generate) -> None:
    async def run() -> None:
        async with AsyncLLM(str(path), **SMALL) as llm:
            steps = 0
            async for output in llm.generate({"prompt_token_ids": prompts[-1]}, GREEDY, "mine"):
                steps += 1
                assert output.request_id == "mine"
            assert output.finished and output.prompt_token_ids == prompts[-1] and steps > 1
            assert output.outputs[0].token_ids == generate(path, prompts, 8)[-1]
            of_separator = llm.get_tokenizer().encode("\u2028", add_special_tokens=False)
            params = SamplingParams(temperature=50, max_tokens=300, seed=1, allowed_token_ids=of_separator)
            async for output in llm.generate("a", params):
                assert set(output.outputs[0].token_ids) <= {*of_separator}
            assert len(output.outputs[0].token_ids) == 300
            assert "\u2028" in output.outputs[0].text, "it ends no line of the stream"
            with pytest.raises(ValueError, match="context"):
                _ = [output async for output in llm.generate("a" * 2000)]
            with pytest.raises(ValueError, match="AsyncLLM asks for: use LLM"):
                _ = [output async for output in llm.generate("a", SamplingParams(prompt_logprobs=0))]

    asyncio.run(run())
    assert spawned and all(process.poll() is not None for process in spawned)


def test_a_failed_start_says_why_and_leaves_nothing(spawned: list[Any], tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"^no such model directory: /no-such-model$"):
        LLM("/no-such-model")
    (tmp_path / "config.json").write_text('{"model_type": "vit", "architectures": ["ViTModel"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    shutil.copy(DEMO / "tokenizer.json", tmp_path)  # without, the router may fail first
    with pytest.raises(SetupError, match=r"not supported[^\n]*\n(.*\n)*[^\n]*could not start; see its error above$"):
        LLM(str(tmp_path))
    assert spawned and all(process.poll() is not None for process in spawned)


def test_adapters(spawned: list[Any], path: Path, prompts: list[list[int]], generate: Generate, tmp_path: Path) -> None:
    """In vLLM's words; each answer is that of merged weights, and a folder is read once."""
    folders = {name: make_adapter(tmp_path / name, path, seed=seed) for seed, name in enumerate("abc")}
    expected = {
        name: generate(merge(tmp_path / f"{name}+", path, folder, {"": 2.0}), prompts[:3], 8)
        for name, folder in folders.items()
    }
    expected[""] = generate(path, prompts[:3], 8)
    a, b = LoRARequest("a"), LoRARequest("b", 2, str(folders["b"]))
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts[:3]]

    def answers(llm: LLM, adapters: Any) -> list[list[int]]:
        outputs = llm.generate(asked, GREEDY, use_tqdm=False, lora_request=adapters)
        assert [output.lora_request for output in outputs] == (
            adapters if isinstance(adapters, list) else [adapters] * 3
        )
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(str(path), enable_lora=True, lora_modules=f"a={folders['a']}", **SMALL) as llm:
        assert answers(llm, b) == expected["b"]
        folders["b"].rename(tmp_path / "moved")
        assert answers(llm, [a, None, b]) == [expected["a"][0], expected[""][1], expected["b"][2]]
        with pytest.raises(ValueError, match="3 prompts and 1 adapters"):
            answers(llm, [a])
        with pytest.raises(ValueError, match=r"nowhere.* cannot be read"):
            answers(llm, LoRARequest("d", 4, "/nowhere"))
        with pytest.raises(ValueError, match="'c' does not exist"):
            answers(llm, LoRARequest("c"))
        again = LoRARequest("c", 3, str(folders["c"]))
        for one, name in ((again, "c"), (LoRARequest("c", 4, str(tmp_path / "moved")), "b"), (again, "c")):
            assert answers(llm, one) == expected[name], "its name stood for another folder meanwhile"
        with pytest.raises(ValueError, match="two folders of adapters have the name 'c'"):
            answers(llm, [again, None, LoRARequest("c", 4, str(tmp_path / "moved"))])


@pytest.mark.parametrize("keys", [{"PDSERVE_API_KEY": f"sha256:{'a' * 64}"}, {"PDSERVE_ADMIN_KEY": "of a deployment"}])
def test_adapters_are_loaded_whatever_keys_the_environment_has(
    keys: dict[str, str], spawned: list[Any], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is given by its digest is not known, and without one for operators, none of them is let in."""
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    with LLM(str(path), enable_lora=True, **SMALL) as llm:
        adapter = LoRARequest("a", 1, str(make_adapter(tmp_path / "a", path)))
        [output] = llm.generate({"prompt_token_ids": [5, 6]}, GREEDY, use_tqdm=False, lora_request=adapter)
        assert len(output.outputs[0].token_ids) == 8


def test_the_key_of_the_environment_opens_its_own_router(
    spawned: list[Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "one, two")
    with LLM(str(path), **SMALL) as llm:
        assert len(llm.generate({"prompt_token_ids": [5, 6]}, GREEDY)[0].outputs[0].token_ids) == 8
    with pytest.raises(PdserveError, match=r"stopped by close\(\); make another"):
        llm.generate({"prompt_token_ids": [5, 6]}, GREEDY)


def test_what_the_program_drops_is_stopped(spawned: list[Any], path: Path) -> None:
    llm = LLM(str(path), **SMALL)
    del llm
    gc.collect()
    assert spawned and all(process.poll() is not None for process in spawned)


def test_another_server_at_the_port_is_not_taken_for_the_router() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SetupError, match="cannot listen on"):
        LLM(port=other.getsockname()[1])


def test_a_fault_at_the_start_does_not_keep_the_caller_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Supervisor) -> Supervisor:
        raise KeyError("a fault")

    monkeypatch.setattr(Supervisor, "__enter__", fail)
    with pytest.raises(SetupError, match="a fault"):
        LLM()


class Idle:
    """A deployment without processes, which is ready or never gets so."""

    url, is_ready = "http://127.0.0.1:1", True

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *_: object) -> None: ...

    def poll_ready(self) -> bool:
        return self.is_ready

    def check_children(self) -> None: ...


def test_the_collector_may_stop_it_anywhere_in_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that holds a lock, as when it begins or ends to wait."""
    monkeypatch.setattr(module, "Deployment", Idle)
    for number in range(40):
        dropped, steps, before = list[Fleet](), count(), {*threading.enumerate()}

        def stop(*_: object, dropped: list[Fleet] = dropped, steps: "count[int]" = steps, number: int = number) -> None:
            if dropped and next(steps) == number:
                dropped[0].close()

        threading.setprofile(stop)
        try:
            dropped.append(Fleet(UpConfig(port=free_port())))
        finally:
            threading.setprofile(None)
        for thread in {*threading.enumerate()} - before:
            thread.join(60)
            assert not thread.is_alive(), f"it waits for itself, stopped at step {number}"


def test_a_start_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of a process that is killed again and again: the caller sees nothing of it."""
    monkeypatch.setattr(module, "Deployment", Idle)
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(Idle, "is_ready", False)
    with pytest.raises(SetupError, match="not ready within 0 s"):
        LLM()
