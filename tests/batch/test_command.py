"""Batch files against a server that the tests play: answers, wrong lines, retries, interruptions."""

import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from pdserve.batch import runner
from pdserve.batch.command import run, server_at
from pdserve.cli.commands import app
from pdserve.errors import SetupError
from pdserve.offline import llm

CHAT = "/v1/chat/completions"


class Server:
    """Answers each request with its prompt; the first `failures[prompt]` times with that status instead."""

    def __init__(self) -> None:
        self.failures: dict[str, list[int]] = {}
        self.seen: Counter[str] = Counter()
        self.keys: set[str | None] = set()
        played = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                prompt = body["prompt"]
                played.seen[prompt] += 1
                played.keys.add(self.headers.get("authorization"))
                left = played.failures.get(prompt, [])
                status = left.pop(0) if left else 200
                answer = json.dumps({"echo": prompt, "path": self.path}).encode()
                self.send_response(status)
                self.send_header("X-Request-Id", f"cmpl-{prompt}")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("PDSERVE_API_KEY", raising=False)
    server = Server()
    yield server
    server.close()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def request(name: str, **fields: Any) -> str:
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name}} | fields
    return json.dumps(line)


def answers(path: Path) -> dict[str, Any]:
    """Return the answers by custom id, or by id if they have none."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines), "a line is answered twice"
    return {line["custom_id"] or line["id"]: line for line in lines}


def test_answers_and_wrong_lines(
    server: Server, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "schlüssel")
    source, target = files
    names = [str(i) for i in range(20)]
    wrong = {
        "this is not JSON": ("batch_req_22", "invalid_json", "line 22: this is not JSON"),
        "[1]": ("batch_req_23", "invalid_json", "must be a JSON object"),
        '{"custom_id": 7}': ("batch_req_24", "invalid_custom_id", "custom_id must be a string"),
        request("0"): ("0", "duplicate_custom_id", "'0' has occurred before"),
        request("get", method="GET"): ("get", "invalid_method", 'method must be "POST"'),
        request("path", url="/admin"): ("path", "invalid_url", "url must be /v1/chat/completions or"),
        request("body", body=[]): ("body", "invalid_body", "body must be a JSON object"),
        request("stream", body={"stream": True}): ("stream", "invalid_body", "stream is not possible"),
        request("more", extra=1): ("more", "unknown_field", "unknown field 'extra'"),
    }
    source.write_text("\n".join([*map(request, names), "", *wrong]) + "\n")
    server.failures["3"] = [400]
    assert run(source, target, server_at(server.url), 4)
    found = answers(target)
    assert len(found) == len(names) + len(wrong) - 1  # the duplicate has the custom id of its twin
    for name in names[1:]:
        response = found[name]["response"]
        assert response["body"] == {"echo": name, "path": "/v1/completions"} and found[name]["error"] is None
        assert (response["status_code"], response["request_id"]) == (400 if name == "3" else 200, f"cmpl-{name}")
    for name, code, message in wrong.values():
        assert found[name]["error"]["code"] == code and message in found[name]["error"]["message"]
    assert server.keys == {"Bearer schlüssel".encode().decode("latin-1")} and max(server.seen.values()) == 1


def test_an_interrupted_batch_goes_on(server: Server, files: tuple[Path, Path]) -> None:
    source, target = files
    names = [str(i) for i in range(8)]
    source.write_text("\n".join(map(request, names)))
    assert run(source, target, server_at(server.url), 2)
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # killed while it wrote the fourth answer
    assert run(source, target, server_at(server.url), 2)
    assert answers(target).keys() == {*names} and sum(server.seen.values()) == 8 + 5
    assert run(source, target, server_at(server.url), 2) and sum(server.seen.values()) == 8 + 5
    source.write_text("\n".join(map(request, reversed(names))))
    with pytest.raises(
        SetupError, match=r"out.jsonl: it answers line 1 as '0', which is of another batch; name another"
    ):
        run(source, target, server_at(server.url), 2)
    target.write_text("something else\n")
    with pytest.raises(SetupError, match="line 1 is not an answer of a batch"):
        run(source, target, server_at(server.url), 2)


def test_overload_is_retried_and_nothing_is_lost(
    server: Server, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "ATTEMPTS", 3)
    monkeypatch.setattr(runner, "RETRY_S", 0.0)
    source, target = files
    source.write_text("\n".join(map(request, ("later", "never", "fine"))))
    server.failures |= {"later": [429, 503], "never": [503] * 3}
    assert not run(source, target, server_at(server.url), 2)
    assert answers(target).keys() == {"later", "fine"}
    assert "line 2: status 503" in capsys.readouterr().err
    assert run(source, target, server_at(server.url), 2), "the same command answers the rest"
    assert answers(target).keys() == {"later", "never", "fine"} and server.seen["fine"] == 1
    target.unlink()
    assert not run(source, target, server_at("http://127.0.0.1:1"), 2) and not target.read_bytes()
    assert "the server does not answer" in capsys.readouterr().err


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"in\.jsonl: No such file"):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", server_at("http://127.0.0.1:1"), 1)
    assert not os.listdir(tmp_path)


def test_nothing_is_started_or_asked_for_before_files_key_and_url_are_right(
    server: Server, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def started() -> Iterator[tuple[str, httpx.Headers]]:
        pytest.fail("a server was started")
        yield "", httpx.Headers()

    source, target = files
    with pytest.raises(SetupError, match=r"in\.jsonl: No such file"):
        run(source, target, started(), 1)
    source.write_text(request("a") + "\n" + request("b") + "\n")
    target.write_text("something else\n")
    with pytest.raises(SetupError, match="line 1 is not an answer"):
        run(source, target, started(), 1)
    target.unlink()
    for url in ("127.0.0.1:8000", "ftp://host"):
        with pytest.raises(SetupError, match="is not a URL; write http://"):
            server_at(url)
    for key, wrong in (
        ("a\nb", "must have printable characters only"),
        (f"sha256:{'a' * 64}", "is the digest of a key"),
    ):
        monkeypatch.setenv("PDSERVE_API_KEY", key)
        with pytest.raises(SetupError, match=f"^PDSERVE_API_KEY {wrong}"):
            server_at(server.url)
    monkeypatch.delenv("PDSERVE_API_KEY")
    server.failures["a"] = [401]
    with pytest.raises(SetupError, match="refuses the key in PDSERVE_API_KEY"):
        run(source, target, server_at(server.url), 1)
    assert run(source, target, server_at(f"{server.url}/v1/"), 1), "the same command goes on"
    assert [line["response"]["status_code"] for line in answers(target).values()] == [200, 200]


def test_what_is_no_strict_json_costs_its_own_line_only(server: Server, files: tuple[Path, Path]) -> None:
    source, target = files
    lone, infinite = (request("lone").replace('"lone"', '"\\ud800"'), request("inf").replace("}}", ', "x": 1e999}}'))
    numbers = request("nan", body={"prompt": "nan", "temperature": float("nan")})
    source.write_text("\ufeff" + "\n".join([request("good"), lone, numbers, infinite, request("last")]) + "\n")
    assert run(source, target, server_at(server.url), 4)
    found = answers(target)
    assert {name for name, line in found.items() if line["response"]} == {"good", "inf", "last"}
    assert {found[name]["error"]["code"] for name in ("batch_req_2", "batch_req_3")} == {"invalid_json"}


@pytest.mark.parametrize("content", ["no answers", request("a"), '{"id": "cmpl-1"', "[" * 100_000 + "\n"])
def test_no_file_of_others_is_cut_off(server: Server, files: tuple[Path, Path], content: str) -> None:
    source, target = files
    source.write_text(request("a") + "\n")
    target.write_text(content)
    with pytest.raises(SetupError, match="line 1 is not an answer"):
        run(source, target, server_at(server.url), 4)
    assert target.read_text() == content


@pytest.mark.parametrize("torn", ['{"', '{"id": "batch_req_1", "cus'])
def test_an_answer_that_was_cut_off_is_asked_for_again(server: Server, files: tuple[Path, Path], torn: str) -> None:
    source, target = files
    source.write_text(request("a") + "\n")
    target.write_text(torn)
    assert run(source, target, server_at(server.url), 4) and list(answers(target)) == ["a"]


def test_faults_without_a_file_name_name_the_file(
    server: Server, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill_the_disk(*_: Any) -> list[str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    source, target = files
    source.write_text(request("a") + "\n")
    reading, writing = os.pipe()
    try:
        with pytest.raises(SetupError, match="is a pipe"):
            run(Path(f"/dev/fd/{reading}"), target, server_at(server.url), 4)
    finally:
        os.close(reading)
        os.close(writing)
    monkeypatch.setattr("pdserve.batch.command.run_batch", fill_the_disk)
    with pytest.raises(SetupError, match=r"out\.jsonl: No space left"):
        run(source, target, server_at(server.url), 4)


def test_a_server_of_its_own_gets_the_key_that_was_made_for_it(
    server: Server, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment may have the digest of a key, which is none."""

    class Fleet:
        url, api_key = server.url, "made"

        def __init__(self, config: object) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(llm, "Fleet", Fleet)
    monkeypatch.setenv("PDSERVE_API_KEY", f"sha256:{'a' * 64}")
    source, target = files
    source.write_text(request("a"))
    done = CliRunner().invoke(app, ["batch", str(source), str(target)])
    assert done.exit_code == 0, done.output
    assert server.keys == {"Bearer made"}
