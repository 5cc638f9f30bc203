"""Grammars compiled in processes with limits: the results, and what happens to grammars that exceed a limit."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import BadRequest, RequestError, Unavailable
from pdserve.grammars import compiler as compiler_module
from pdserve.grammars import mask_client
from pdserve.grammars.compiler import GrammarCompiler
from pdserve.grammars.formats import specified
from pdserve.grammars.limits import CompileLimits, GrammarTooComplex
from pdserve.grammars.mask_client import LoadedGrammar
from pdserve.grammars.mask_worker import LOADED
from pdserve.priority import NICENESS, cpu_seconds, lower

GOOD = json.dumps({"regex": r"[ab]{3,7}-\d{4}"})
VOCAB_SIZE = 256
LIMITS = CompileLimits(cpu_s=600, elapsed_s=600, memory_bytes=32 << 20)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


Get = Callable[[GrammarCompiler, str], object]
BY_BOTH = pytest.mark.parametrize("get", [GrammarCompiler.compile, LoadedGrammar])


@pytest.fixture(scope="module")
def compiler(model: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(str(model), VOCAB_SIZE, [0], LIMITS)
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"json": {"type": "foo"}}, 'the grammar cannot be used: "type" ["foo"], which is not a type, at the top'),
        ({"regex": r"\ba"}, 'the grammar cannot be used: invalid regex "\\\\ba"'),
        ({"regex": "[a"}, "the grammar cannot be used: unclosed character class"),
        ({"grammar": "nothing"}, "the grammar cannot be used: a rule must begin with its name and ::= (line 1)"),
    ],
)
@BY_BOTH
def test_invalid_grammars(compiler: GrammarCompiler, get: Get, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as raised:
        get(compiler, json.dumps(spec))
    assert str(raised.value).startswith(message)
    assert not isinstance(raised.value, GrammarTooComplex)


CLOSED = [
    {"type": "object", "properties": {name: {}}, "required": [name], "additionalProperties": False} for name in "ab"
]


@pytest.mark.parametrize(
    "impossible",
    [
        {"allOf": CLOSED},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "minimum": 5, "maximum": 2},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"anyOf": [False, False]},
    ],
)
@BY_BOTH
def test_a_schema_without_a_value_is_refused_with_its_place(
    compiler: GrammarCompiler, get: Get, impossible: dict[str, Any]
) -> None:
    schema = {
        "$ref": "#/$defs/T",
        "$defs": {"T": {"properties": {"x": {}, "u/v": {"items": {"anyOf": [{"type": "null"}, impossible]}}}}},
    }
    call = {"type": "sequence", "elements": [{"type": "literal", "text": "f("}, specified({"json": schema})]}
    for spec in ({"json": schema}, {"format": call}):
        with pytest.raises(BadRequest, match=r", at /\$defs/T/properties/u~1v/items/anyOf/1 of the schema$"):
            get(compiler, json.dumps(spec))
    with pytest.raises(BadRequest, match=r", at the top of the schema$"):
        get(compiler, json.dumps({"json": impossible}))


CHAIN = {str(i): {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(890)}
# An intersection for each, so that llguidance follows all references in one go.
OVERFLOWING = {"allOf": [{"$ref": "#/$defs/0"}, {"anyOf": [{}]}], "$defs": {**CHAIN, "890": {}}}


@pytest.mark.parametrize("spec", [{"json": {"type": "integer", "multipleOf": 999_983}}, {"json": OVERFLOWING}])
@BY_BOTH
def test_a_grammar_that_needs_too_much_memory_or_stack_is_rejected(
    compiler: GrammarCompiler, get: Get, spec: Any
) -> None:
    with pytest.raises(GrammarTooComplex, match=r"too expensive.* 600 s of CPU time and 32 MiB of memory"):
        get(compiler, json.dumps(spec))
    assert_ends_with(compiler, {compiler.server_pid})
    assert compiler.compile(GOOD)


@BY_BOTH
def test_a_grammar_that_takes_too_long_is_rejected(model: Path, get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """From some CPU time on, others go before a worker that compiles one."""
    lowered = list[int]()

    def record(pid: int) -> None:
        lower(pid)
        lowered.append(os.getpriority(os.PRIO_PROCESS, pid))

    monkeypatch.setattr(mask_client, "lower", record)
    compiler = GrammarCompiler(str(model), VOCAB_SIZE, [0], CompileLimits(cpu_s=1, memory_bytes=16 * 2**30))
    with pytest.raises(GrammarTooComplex):
        get(compiler, json.dumps({"json": {"type": "integer", "multipleOf": 999_983}}))
    assert lowered == ([] if get is GrammarCompiler.compile else [min(19, os.nice(0) + NICENESS)])
    assert_ends_with(compiler, {compiler.server_pid})
    compiler.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_is_killed_for_no_limit_is_replaced_once(model: Path, times: int) -> None:
    """Such as by the kernel, for lack of memory: that says nothing about the grammar, and clients are not told so."""
    limits = CompileLimits(cpu_s=3, elapsed_s=600, memory_bytes=16 * 2**30)
    compiler = GrammarCompiler(str(model), VOCAB_SIZE, [0], limits)
    compiler.start()
    with ThreadPoolExecutor(1) as threads:
        compiling = threads.submit(compiler.compile, json.dumps({"json": {"type": "integer", "multipleOf": 999_983}}))
        killed = set[int]()
        while len(killed) < times:
            for pid in {*children_of(compiler.server_pid)} - killed:
                if cpu_seconds(pid) > 0.1:  # it is compiling
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            time.sleep(0.005)
        error = compiling.exception(600)
    assert isinstance(error, RequestError) and compiler.num_workers_lost == times
    if times == 1:
        assert isinstance(error, GrammarTooComplex), "of the second process"
    else:
        assert error.status == 500 and "try again" in str(error)
    compiler.close()


@BY_BOTH
def test_elapsed_time_is_not_the_grammars_fault(model: Path, get: Get) -> None:
    """It ends what hangs, and what gets no CPU time on a machine that is too busy."""
    limits = CompileLimits(cpu_s=60, elapsed_s=1, memory_bytes=16 * 2**30)
    compiler = GrammarCompiler(str(model), VOCAB_SIZE, [0], limits)
    with pytest.raises(RequestError, match="try again") as raised:
        get(compiler, json.dumps({"json": {"type": "integer", "multipleOf": 999_983}}))
    assert raised.value.status == 500 and compiler.num_workers_lost == 2
    compiler.close()


def test_a_compile_server_that_hangs_is_replaced(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it hangs, no mask worker can be started, and no sequence may wait for that without an end."""
    monkeypatch.setattr(compiler_module, "GRACE_S", 5.0)
    compiler = GrammarCompiler(str(model), VOCAB_SIZE, [0], LIMITS)
    compiler.start()
    first = compiler.server_pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    assert LoadedGrammar(compiler, GOOD).worker is not None
    assert compiler.server_pid != first and not Path(f"/proc/{first}").exists()
    compiler.close()


def test_the_compile_server_may_be_loaded_before_the_first_grammar(model: Path) -> None:
    compiler = GrammarCompiler(str(model), VOCAB_SIZE, [0], LIMITS)
    compiler.start()
    loaded = compiler.server_pid
    assert loaded is not None and compiler.compile(GOOD)
    assert compiler.server_pid == loaded
    compiler.close()


def test_a_compile_server_that_died_is_replaced_until_the_compiler_is_closed(model: Path) -> None:
    compiler = GrammarCompiler(str(model), VOCAB_SIZE, [0], LIMITS)
    expected = compiler.compile(GOOD)
    first = compiler.server_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert compiler.compile(GOOD) == expected
    assert compiler.server_pid != first
    compiler.close()
    assert_ends_with(compiler, set())
    with pytest.raises(Unavailable):
        compiler.compile(GOOD)


SLOW_PROGRAM = """#!{python}
import time
from pathlib import Path

if not Path("{ended}").exists():  # then it is the first one
    Path("{started}").write_text("")
    time.sleep(60)
    Path("{ended}").touch()
"""


def test_closing_does_not_wait_for_a_compile_server_that_is_starting(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended, program = tmp_path / "started", tmp_path / "ended", tmp_path / "hanging-python"
    os.mkfifo(started)
    program.write_text(SLOW_PROGRAM.format(python=sys.executable, started=started, ended=ended))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    compiler = GrammarCompiler(str(model), VOCAB_SIZE, [0], LIMITS)
    with ThreadPoolExecutor(2) as threads:
        compiling = [threads.submit(compiler.compile, GOOD) for _ in range(2)]
        started.read_text()
        compiler.close()
        assert not ended.exists()
        for one in compiling:
            with pytest.raises(RequestError, match=r"did not start|is shutting down"):
                one.result(600)
    assert_ends_with(compiler, set())


def test_compiling_yields_to_other_sessions_and_masks_do_not(compiler: GrammarCompiler) -> None:
    compiler.start()
    assert_ends_with(compiler, {compiler.server_pid})
    worker, pid = compiler.fork_mask_worker()
    with worker:
        specification = b'{"choice": ["a"]}'
        worker.sendall(len(specification).to_bytes(4, "big") + specification)
        assert worker.recv(1) == LOADED
        assert children_of(compiler.server_pid) == [pid]
        assert session_niceness(compiler.server_pid) in (10, None)
        assert session_niceness(pid) in (0, None)


def children_of(pid: int | None) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def session_niceness(pid: int | None) -> int | None:
    """Return the niceness of a process's session; None: the kernel does not group by sessions."""
    path = Path(f"/proc/{pid}/autogroup")
    return int(path.read_text().split()[-1]) if path.exists() else None


def assert_ends_with(compiler: GrammarCompiler, expected: set[int | None]) -> None:
    """Wait until only these processes are left: an answer may arrive before the process that compiled has ended."""
    give_up = time.monotonic() + 600
    while group_of(compiler) != expected:
        assert time.monotonic() < give_up, "a process that compiled is left"
        time.sleep(0.02)


def group_of(compiler: GrammarCompiler) -> set[int]:
    """Return the processes in the compile server's process group."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = path.read_text().rpartition(") ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, group = rest.split()[:3]
        if int(group) == compiler.server_pid and state != "Z":
            found.add(int(path.parent.name))
    return found
