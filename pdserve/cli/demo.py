"""`pdserve demo`: send one chat request through a router, a prefill and a decode instance, and print its timeline."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from pdserve.cli.deployment import free_port
from pdserve.cli.up import curl_line, deployment_of
from pdserve.config import DEFAULT_PORT, UpConfig
from pdserve.errors import IS_CHECKOUT, SetupError
from pdserve.lines.event_stream import read_events

QUESTION = "What is the capital of France?"
REQUEST_ID = "demo"
# Unchecked on this machine: loading the certificates of authorities would take as long as the answer; and without a proxy.
HERE: dict[str, Any] = {"verify": False, "trust_env": False}
TIMELINE_TIMEOUT_S = 10.0  # the last stamps reach the router shortly after the last token


def demo(config: UpConfig) -> None:
    """Start a deployment, stream one chat answer, print the request's timeline, and stop the deployment.

    Raises:
        SetupError: the deployment cannot start.
    """
    console = Console(highlight=False)
    log: list[str] = []
    if config.port == DEFAULT_PORT:
        config = replace(config, port=free_port())
    if config.local_prefill_tokens is None:
        config = replace(config, local_prefill_tokens=0)  # always prefill remotely, to show a hand-over
    config = replace(config, api_key="", admin_key="")  # the environment has those of a permanent deployment
    started = time.monotonic()

    def on_line(line: str) -> None:
        log.append(line)
        if "compiling" in line or "falls back" in line:  # why it takes long
            console.print(_text(line), style="dim", soft_wrap=True)

    with deployment_of(config, on_line) as deployment:
        instances = len(deployment.children) - 1
        with console.status(
            f"starting a router and {instances} instances on {config.model} over {deployment.connector.split('://')[0]}:// …"
        ):
            try:
                deployment.wait_ready()
            except SetupError:
                print("\n".join(log), file=sys.stderr)  # contains the reason
                raise
        for line in log:
            if "ready in" in line:
                console.print(_text(line), style="dim", soft_wrap=True)
        console.print(f"up after {time.monotonic() - started:.1f} s\n\n[bold]user:[/bold] {QUESTION}")
        console.print("[bold]demo:[/bold] ", end="")
        for text in _stream_chat(deployment.url, config.name, QUESTION):
            sys.stdout.write(text)
            sys.stdout.flush()
        print("\n")
        _print_timeline(console, _wait_for_timeline(deployment.url))
    console.print(
        "stopped; no process and no shared memory is left. To start a permanent deployment:\n", soft_wrap=True
    )
    console.print(f"  {'.venv/bin/' * IS_CHECKOUT}pdserve up\n\nand, from a second terminal:\n")
    console.print(f"  {curl_line(f'http://127.0.0.1:{DEFAULT_PORT}', config.name)}", soft_wrap=True, markup=False)


def _text(line: str) -> str:
    """Return a line of a log without its time."""
    return f"  {line.split(' I ', 1)[-1]}"


def _stream_chat(url: str, model: str, question: str) -> Iterator[str]:
    """Yield the text pieces of a streamed chat answer."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True}
    headers = {"x-request-id": REQUEST_ID}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60, **HERE) as reply:
        reply.read() if reply.status_code != 200 else None
        reply.raise_for_status()
        for data in read_events(reply.iter_bytes()):
            if data != "[DONE]":
                yield from (choice["delta"].get("content") or "" for choice in json.loads(data)["choices"])


def _wait_for_timeline(url: str) -> dict[str, Any]:
    """Return the request's timeline, complete unless `TIMELINE_TIMEOUT_S` passes first."""
    deadline = time.monotonic() + TIMELINE_TIMEOUT_S
    while True:
        answer = httpx.get(f"{url}/debug/requests/{REQUEST_ID}", **HERE)
        timeline: dict[str, Any] = answer.raise_for_status().json()
        stages = timeline["stages_ms"].keys()
        # Of KV that has moved, prefill reports the last store, perhaps after the answer's end.
        is_complete = "finished" in stages and ("kv_stored" in stages or "kv_ready" not in stages)
        if is_complete or time.monotonic() > deadline:
            return timeline
        time.sleep(0.02)


def _print_timeline(console: Console, timeline: dict[str, Any]) -> None:
    table = Table(title="what happened, and when", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("stage")
    table.add_column("ms", justify="right")
    table.add_column("")
    total = max(timeline["stages_ms"].values()) or 1.0
    for stage, at in timeline["stages_ms"].items():
        table.add_row(stage, f"{at:.1f}", "·" * round(30 * at / total) + "●")
    console.print(table)
    loaded = timeline["loaded"]
    console.print(
        f"\n{timeline['prefill_instance']} computed {timeline['prompt_tokens_by_source']['computed']} prompt tokens; "
        f"{loaded['blocks']} KV blocks ({loaded['bytes'] / 2**20:.2f} MiB) crossed to {timeline['decode_instance']} "
        f"at {loaded['gb_per_s']:.2f} GB/s, which decoded {timeline['output_tokens'] - 1} tokens.\n",
        soft_wrap=True,
    )
