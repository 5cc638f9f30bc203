"""The client against real sockets: what is counted, what waits, and what errors become."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from pdserve.tools.bench.load import Load, Target
from pdserve.tools.bench.metrics import summarize
from pdserve.tools.bench.report import as_text
from pdserve.tools.bench.requests import Request, Sample
from pdserve.tools.bench.server import acceptance, read_breakdown, read_drafts

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
METRICS = ["ttft", "tpot", "itl", "e2el"]


async def stream(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Answer with `max_tokens` events, as completions or chat, split at odd places."""
    chat = "messages" in body
    tokens = body["max_completion_tokens" if chat else "max_tokens"]
    choice = {"delta": {"content": "x"}} if chat else {"text": "x"}
    events = [json.dumps({"choices": [choice]})] * tokens
    events += [json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}}), "[DONE]"]
    content = "".join(f"data: {event}\r\n\r\n" for event in events).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for at in range(0, len(content), 50):
        piece = content[at : at + 50]
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")


async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    content = json.dumps({"error": {"message": "too many requests"}}).encode()
    writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))


async def break_off(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\ndata: {"choices"')
    writer.close()


async def never(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


class Server:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.connections = self.port = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Server"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        yield self
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                writer.close()
                return
            self.paths.append(head.split()[1].decode())
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            await self.answer(self.bodies[-1], writer)


def play(
    server: Server, requests: list[Request], stop_after: int | None = None, **settings: Any
) -> tuple[list[Sample], int]:
    """Play requests; with `stop_after`, until the server has received so many."""

    async def run() -> tuple[list[Sample], int]:
        async with server.running():
            chat = settings.pop("chat", False)
            where: dict[str, Any] = {
                "url": f"http://127.0.0.1:{server.port}{settings.pop('below', '')}",
                "path": "/v1/any",
                "run": "r",
                "words": ("a", "b"),
            }
            target = Target(**where, chat=chat, model="m", body={}, headers={}, **settings)
            samples: list[Sample] = []
            stop = asyncio.Event()

            async def watch() -> None:
                while stop_after is None or len(server.bodies) < stop_after:
                    await asyncio.sleep(0)
                stop.set()

            watching = asyncio.create_task(watch())
            interrupted = await Load(target, time.perf_counter(), samples.append).play(requests, stop)
            watching.cancel()
            return sorted(samples, key=lambda sample: sample.index), interrupted

    return asyncio.run(run())


def prompts(count: int, tokens: int = 3) -> list[Request]:
    return [Request(index, tokens, text=f"p{index}", at=0.0) for index in range(count)]


@pytest.mark.parametrize("chat", [False, True])
def test_tokens_are_counted_in_both_apis(chat: bool) -> None:
    samples, interrupted = play(Server(stream), prompts(20, tokens=5), chat=chat)
    assert [(one.ok, one.output_tokens, one.input_tokens, one.text) for one in samples] == [(True, 5, 7, "xxxxx")] * 20
    assert all(len(one.token_times) == 5 and one.ttft <= one.latency for one in samples) and not interrupted


def test_the_path_of_the_base_url_is_kept() -> None:
    for below, path in (("", "/v1/any"), ("/model-a", "/model-a/v1/any"), ("/a/b c/", "/a/b%20c/v1/any")):
        server = Server(stream)
        [sample], _ = play(server, prompts(1), below=below)
        assert sample.ok and server.paths == [path]


def test_a_429_is_rejected_and_not_lost() -> None:
    samples, _ = play(Server(refuse), prompts(4))
    figures = summarize(samples, {"ttft": 1.0}, METRICS, [99], [0.1])
    assert (figures["completed"], figures["failed"], figures["rejected"]) == (0, 4, 4)
    assert figures["good_request_fraction"] == 0 and {one.error for one in samples} == {"too many requests"}
    assert re.search(r"rejected \(429\): +4\b", as_text(figures, METRICS, [99]))


def test_an_answer_that_breaks_off_failed() -> None:
    samples, _ = play(Server(break_off), prompts(2))
    assert [one.ok for one in samples] == [False, False] and all(one.error for one in samples)


def test_an_odd_event_fails_its_request_and_the_run_goes_on() -> None:
    async def odd_once(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["prompt"] != "p1":
            return await stream(body, writer)
        event = b'data: {"choices":[null]}\n\ndata: [DONE]\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(event), event))

    samples, interrupted = play(Server(odd_once), prompts(3))
    assert [one.ok for one in samples] == [True, False, True] and not interrupted
    figures = summarize(samples, {}, METRICS, [99], [0.1])
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (2, 1, 6)


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    async def once(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await stream(body, writer)
        writer.close()

    turns = [Request(index, 2, text="a", at=0.0, after=index - 1 if index else None) for index in range(5)]
    samples, _ = play(Server(once), turns)
    assert [one.error for one in samples] == [""] * 5


def test_max_concurrency_holds_and_its_wait_is_not_lag() -> None:
    server = Server(stream)
    samples, _ = play(server, prompts(12), max_concurrency=3)
    assert server.connections <= 3 and all(one.ok for one in samples)
    assert max(one.queued for one in samples) > 0
    assert all(one.lag <= one.sent - one.scheduled - one.queued + 1e-9 for one in samples)


def test_turns_wait_for_the_answer_and_contain_it() -> None:
    turns = [
        Request(0, 2, text="one", at=0.0),
        Request(1, 1, text="two", at=0.0, after=0, continues=True),
        Request(2, 1, text="three", at=0.0, after=1, continues=True),
    ]
    server = Server(stream)
    samples, _ = play(server, turns, chat=True)
    contents = [message["content"] for message in server.bodies[2]["messages"]]
    assert contents == ["one", "xx", "two", "x", "three"]
    assert all(later.scheduled >= earlier.ended for earlier, later in pairwise(samples))
    plain = Server(stream)
    play(plain, turns)
    assert plain.bodies[2]["prompt"] == "onexxtwoxthree"


def test_turns_after_a_failed_one_are_counted_as_failed() -> None:
    samples, _ = play(Server(refuse), [Request(0, 1, at=0.0), Request(1, 1, after=0), Request(2, 1, after=1)])
    assert [one.status for one in samples] == [429, 0, 0]
    assert samples[2].error == "the previous turn failed"


def test_a_stop_keeps_what_was_measured() -> None:
    async def first_only(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await (stream if body["prompt"] == "p0" else never)(body, writer)

    samples, interrupted = play(Server(first_only), prompts(3), stop_after=3, max_concurrency=None)
    assert len(samples) + interrupted == 3 and interrupted >= 2


def test_a_slow_client_is_named() -> None:
    late = [Sample(i, 0.0, sent=0.05, ended=0.2, token_times=[0.1], status=200, output_tokens=1) for i in range(3)]
    assert "50.0 ms late" in summarize(late, {}, METRICS, [99], [0.1])["client_bottleneck"]
    on_time = [Sample(i, 0.0, ended=0.2, token_times=[0.1], status=200, output_tokens=1) for i in range(3)]
    assert summarize(on_time, {}, METRICS, [99], [0.1])["client_bottleneck"] == ""
    assert "95% of a core" in summarize(on_time, {}, METRICS, [99], [0.95])["client_bottleneck"]


def test_a_late_client_that_hardly_computes_was_on_a_busy_machine() -> None:
    late = [Sample(i, 0.0, sent=0.05, ended=0.2, token_times=[0.1], status=200, output_tokens=1) for i in range(3)]
    text = summarize(late, {}, METRICS, [99], [0.1])["client_bottleneck"]
    assert text.startswith("the machine was busy") and "10% of a core" in text
    assert summarize(late, {}, METRICS, [99], [0.7])["client_bottleneck"].startswith("the client was the bottleneck")


def test_latency_is_normalized_by_tokens_and_those_that_come_together_are_counted() -> None:
    steady = Sample(0, 0.0, ended=0.4, token_times=[0.1, 0.2, 0.3, 0.4], status=200, output_tokens=4)
    stalled = Sample(1, 0.0, ended=0.8, token_times=[0.8, 0.8, 0.8, 0.8], status=200, output_tokens=4)
    figures = summarize([steady, stalled], {}, METRICS, [50], [0.1])
    assert figures["mean_normalized_latency_ms"] == pytest.approx(150) and figures["tokens_together_fraction"] == 0.5
    text = as_text(figures, METRICS, [50])
    assert re.search(r"Normalized latency \(ms per output token\): +150\.00", text) and re.search(
        r"came together \(%\): +50", text
    )
    assert "together" not in as_text(summarize([steady], {}, METRICS, [50], [0.1]), METRICS, [50])


def test_a_hand_over_that_decode_did_not_need_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode starts before the first token where it computes the prompt itself."""
    stages = {"received": 0.0, "prefill_started": 5.0, "first_token": 20.0}
    timelines = {"moved": stages | {"decode_started": 30.0}, "local": stages | {"decode_started": 4.0}}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"stages_ms": timelines[request.url.path.rpartition("/")[2]]})

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **_: client(transport=httpx.MockTransport(answer)))
    samples = [Sample(0, 0.0, ended=1, token_times=[0.1], status=200, request_id=one) for one in timelines]
    found = read_breakdown("http://server", samples)
    assert found is not None and found["mean_hand_over_ms"] == 10.0 and found["mean_prefill_ms"] == 15.0


def test_accepted_drafts_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([(2, 8, 8), (12, 48, 28)])

    def metrics(_: httpx.Request) -> httpx.Response:
        names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
        return httpx.Response(
            200,
            text="\n".join(
                f'pdserve_spec_decode_num_{name}_total{{instance="{one}"}} {value / 2}'
                for name, value in zip(names, [*next(counts), 99], strict=True)
                for one in "ab"
            ),
        )

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **given: client(transport=httpx.MockTransport(metrics), **given))
    before = read_drafts("http://server")
    found = acceptance(before, read_drafts("http://server"))
    assert found is not None and found["spec_decode_num_drafts"] == 10
    steady = Sample(0, 0.0, ended=0.4, token_times=[0.1, 0.2], status=200, output_tokens=2)
    figures = summarize([steady], {}, METRICS, [50], [0.1])
    text = as_text(figures | found, METRICS, [50])
    assert re.search(r"Acceptance rate \(%\): +50\.00", text) and re.search(r"Acceptance length: +3\.00", text)
    assert acceptance(before, before) is None and "Speculative" not in as_text(figures, METRICS, [50])


def test_samples_have_the_api_keys_of_a_trace_for_targets_by_key() -> None:
    requests = [Request(0, 2, text="a", at=0.0, key="chat"), Request(1, 2, text="b", at=0.0)]
    requests += [Request(2, 2, text="c", after=0, at=0.0, key="chat")]
    samples, _ = play(Server(stream), requests)
    assert [one.key for one in samples] == ["chat", "", "chat"] and all(one.ok for one in samples)
    samples, _ = play(Server(break_off), requests)
    assert [one.key for one in samples] == ["chat", "", "chat"] and not any(one.ok for one in samples)
