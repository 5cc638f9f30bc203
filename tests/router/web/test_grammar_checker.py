"""Grammars are checked before admission: verdicts, their cache, and the turns of the API keys."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config import RouterConfig
from pdserve.errors import BadRequest, Overloaded, RequestError
from pdserve.grammars.limits import GrammarTooComplex
from pdserve.router.backend import ModelInfo
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.web import grammar_checker
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.app import create_app
from pdserve.router.web.grammar_checker import COMPILE_THREADS, MAX_WAITING, GrammarChecker

if TYPE_CHECKING:
    from pdserve.router.telemetry.metrics import Metrics
    from pdserve.router.text.tokenizer import Tokenizer
    from tests.router.conftest import Client, ScriptedBackend

INFO = ModelInfo("demo", 100, 100, 256, frozenset([0]), b"digest", frozenset([16]), supports_grammars=True)


@dataclass
class FakeCompiler:
    """Rejects specifications that hold `invalid`; those with `bomb` end with an error once `proceed` is set."""

    compiled: list[str] = field(default_factory=list)
    proceed: threading.Event = field(default_factory=threading.Event)
    is_closed: bool = False

    def start(self) -> None:
        assert self.proceed.wait(600)
        raise RequestError("the compile server did not start", kind="internal_error")

    def compile(self, spec: str) -> bytes:
        self.compiled.append(spec)
        if "bomb" in spec:
            assert self.proceed.wait(600)
            raise GrammarTooComplex("too expensive", kind="invalid_grammar")
        if "invalid" in spec:
            raise BadRequest("the grammar cannot be used", kind="invalid_grammar")
        return b""

    def close(self) -> None:
        self.is_closed = True


def make_checker(compiler: FakeCompiler, on_result: Callable[[str], None] = lambda result: None) -> GrammarChecker:
    return GrammarChecker(lambda info: compiler, on_result)  # type: ignore[arg-type, return-value]  # has what is used


@pytest.fixture
def compiler() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
def checker(compiler: FakeCompiler) -> GrammarChecker:
    return make_checker(compiler)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stop_while_the_compile_server_starts_is_no_reason_to_warn(
    is_closed: bool, compiler: FakeCompiler, checker: GrammarChecker, caplog: pytest.LogCaptureFixture
) -> None:
    checker.start(INFO)
    if is_closed:
        checker.close()
    compiler.proceed.set()
    checker._threads.shutdown()
    assert [record.getMessage() for record in caplog.records] == (
        [] if is_closed else ["structured output will fail: the compile server did not start"]
    )


@pytest.fixture
def make_checked_client(
    tokenizer: Tokenizer,
    backend: ScriptedBackend,
    metrics: Metrics,
    make_client: Callable[..., Client],
    checker: GrammarChecker,
) -> Callable[..., Client]:
    """make_checked_client(keys_file) → a client of an application that checks grammars."""

    def make(keys_file: str = "") -> Client:
        config = RouterConfig(model="demo")
        admission = AdmissionController(load_api_keys("", keys_file), config, metrics, lambda: 1000.0)
        latest = backend.log.latest
        return make_client(create_app(config, tokenizer, backend, admission, list, latest, dict, grammars=checker))

    return make


@pytest.fixture
def checked_client(make_checked_client: Callable[..., Client]) -> Client:
    return make_checked_client()


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_a_request_with_an_invalid_grammar_reaches_no_instance(
    checked_client: Client, backend: ScriptedBackend, compiler: FakeCompiler, path: str, prompt: dict[str, Any]
) -> None:
    compiler.proceed.set()
    for regex, message in (("invalid", "the grammar cannot be used"), ("bomb", "too expensive")):
        reply = checked_client.post(path, {**prompt, "guided_regex": regex})
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_grammar"}
        assert (reply.status_code, reply.json()) == (400, {"error": error})
    assert backend.requests == []
    assert checked_client.post(path, {**prompt, "guided_regex": "good"}).status_code == 200
    assert checked_client.post(path, prompt).status_code == 200
    assert len(backend.requests) == 2 and len(compiler.compiled) == 3


def test_a_refused_grammar_counts_as_a_request(
    make_checked_client: Callable[..., Client],
    checker: GrammarChecker,
    compiler: FakeCompiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one of too many of its key: each was read and tokenized before."""
    compiler.proceed.set()
    (tmp_path / "keys.toml").write_text('[alice]\nkey = "a"\nrequests = "9/h"\n')
    client = make_checked_client(str(tmp_path / "keys.toml"))

    def left(regex: str) -> tuple[int, str]:
        body, headers = {"prompt": "hello", "guided_regex": regex}, {"Authorization": "Bearer a"}
        reply = client.post("/v1/completions", body, headers=headers)
        return reply.status_code, reply.headers["x-ratelimit-remaining-requests"]

    assert [left("invalid"), left("invalid again"), left("bomb"), left("good")] == [
        *((400, "8"), (400, "7"), (400, "6"), (200, "5")),
    ]
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 0)
    assert left("one too many") == (429, "4")


def test_verdicts_are_cached_within_bounds(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "CACHE_ENTRIES", 2)
    results: list[str] = []
    checker = make_checker(compiler, results.append)
    compiler.proceed.set()

    async def check_all() -> None:
        for spec in ("good", "invalid", "good", "invalid", "other", "invalid", "good", "bomb", "bomb"):
            try:
                await checker.check("key", spec, INFO)
            except BadRequest:
                assert spec in ("invalid", "bomb")

    asyncio.run(check_all())
    assert compiler.compiled == ["good", "invalid", "other", "good", "bomb", "bomb"]
    assert results == ["valid", "invalid", "valid", "valid", "too_expensive", "too_expensive"]


def test_expensive_grammars_of_one_key_do_not_delay_those_of_others(
    checker: GrammarChecker, compiler: FakeCompiler
) -> None:
    async def check_all() -> None:
        bombs = [asyncio.create_task(checker.check("attacker", f"bomb {i}", INFO)) for i in range(MAX_WAITING)]
        await asyncio.to_thread(wait_for, lambda: bool(compiler.compiled))
        with pytest.raises(Overloaded, match=f"^{MAX_WAITING} new grammars of this key are waiting"):
            await checker.check("attacker", "good", INFO)
        assert checker.num_waiting == MAX_WAITING
        for i in range(3):
            await checker.check("other", f"good {i}", INFO)
        assert sum("bomb" in spec for spec in compiler.compiled) == 1 < COMPILE_THREADS
        compiler.proceed.set()
        results = await asyncio.gather(*bombs, return_exceptions=True)
        assert all(isinstance(result, GrammarTooComplex) for result in results)
        await checker.check("attacker", "good", INFO)
        await asyncio.sleep(0)
        assert checker.num_waiting == 0

    asyncio.run(check_all())


def test_equal_grammars_of_a_key_are_compiled_once(checker: GrammarChecker, compiler: FakeCompiler) -> None:
    async def check_all() -> None:
        tasks = [asyncio.create_task(checker.check("key", "bomb", INFO)) for _ in range(100)]
        await asyncio.to_thread(wait_for, lambda: bool(compiler.compiled))
        tasks[0].cancel()
        compiler.proceed.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(isinstance(result, GrammarTooComplex) for result in results[1:])

    asyncio.run(check_all())
    assert compiler.compiled == ["bomb"]
    checker.close()
    assert compiler.is_closed


def test_a_nested_schema_is_rejected_without_compiling(
    checked_client: Client, backend: ScriptedBackend, compiler: FakeCompiler
) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(150):  # levels of the body, whose own limit is 200
        schema = {"type": "array", "items": schema}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("guided_json", {"guided_json": json.dumps(schema)}),
        ("structured_outputs.json", {"structured_outputs": {"json": schema}}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
        ),
    ]
    for param, body in bodies:
        reply = checked_client.post("/v1/completions", {"prompt": "hello", **body})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_grammar", param) and "nested too deeply" in error["message"]
    assert not backend.requests and not compiler.compiled


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; only a hang takes longer than the test allows."""
    event = threading.Event()
    while not condition():
        event.wait(0.005)
