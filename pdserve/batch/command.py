"""`pdserve batch`: answers a batch file, by a running server or by one of its own, and goes on where it was interrupted."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from pdserve.admin_client import DIRECT, key_header
from pdserve.batch.lines import BatchRequest, InvalidLine, Json, parse_lines, read_done
from pdserve.batch.runner import run_batch
from pdserve.errors import SetupError
from pdserve.lines.untrusted import read_json
from pdserve.server_url import server_url

MAX_SHOWN = 5  # unanswered requests


Server = AbstractContextManager[tuple[str, httpx.Headers]]  # its URL and the header with a key for it


def server_at(url: str) -> Server:
    """Return a running server for `run`, with the first key of PDSERVE_API_KEY.

    Raises:
        SetupError: the URL names no server of http or https, or no header can have the key.
    """
    key = key_header("PDSERVE_API_KEY", os.environ.get("PDSERVE_API_KEY", "").split(",")[0])
    return nullcontext((server_url(url, "--url", "PDSERVE_API_KEY"), key))


def run(source: Path, target: Path, server: Server, concurrency: int) -> bool:
    """Append the missing answers to `target`; return whether all lines are answered.

    Args:
        server: entered once the files are known to be right.

    Raises:
        SetupError: a file cannot be read or written, `target` is of another batch, or the server refuses the key.
    """
    try:
        with source.open("rb") as lines, target.open("a+b") as answers:
            if not lines.seekable():
                raise SetupError(f"{source} is a pipe, which can be read only once; name a file")
            answers.seek(0)
            done = read_done(answers)
            with server as (url, key):
                return asyncio.run(_run(lines, answers, done, url, key, concurrency))
    except OSError as error:
        raise SetupError(f"{error.filename or target}: {error.strerror}") from error  # a full disk is of no file name
    except ValueError as error:
        raise SetupError(f"{target}: {error}; name another file") from error


async def _run(
    lines: BinaryIO, answers: BinaryIO, done: Mapping[int, str | None], url: str, key: httpx.Headers, concurrency: int
) -> bool:
    total = sum(1 for line in lines if line.strip())
    lines.seek(0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url,
        headers=key,
        timeout=None,
        limits=limits,
        verify=url.startswith("https"),
        mounts=DIRECT,
    ) as http:
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("requests", total=total, completed=len(done))

            async def write(line: Json) -> None:
                answers.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                answers.flush()
                bar.advance(task)

            unanswered = await run_batch(_each(parse_lines(lines)), done, _sender(http), write, concurrency)
    for text in unanswered[:MAX_SHOWN]:
        print(text, file=sys.stderr)
    if unanswered:
        print(f"{len(unanswered)} requests have no answer; run the same command again to try these", file=sys.stderr)
    return not unanswered


async def _each(lines: Iterable[BatchRequest | InvalidLine]) -> AsyncIterator[BatchRequest | InvalidLine]:
    for line in lines:
        yield line


def _sender(http: httpx.AsyncClient) -> Callable[[BatchRequest], Any]:
    async def send(request: BatchRequest) -> tuple[int, str, Json]:
        content = json.dumps(request.body).encode()  # whatever it is, the server judges it
        try:
            answer = await http.post(request.url, content=content, headers={"Content-Type": "application/json"})
            if answer.status_code == 401:  # as all others would be, in answers that are kept
                raise SetupError(f"the server refuses the key in PDSERVE_API_KEY: {answer.text[:200]}")
            return answer.status_code, answer.headers.get("x-request-id", ""), read_json(answer.content)
        except httpx.TransportError as error:
            raise OSError(repr(error)) from error
        except ValueError as error:  # no JSON: something else than a server of this API answered
            raise OSError(f"status {answer.status_code} without JSON") from error

    return send
