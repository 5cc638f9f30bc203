"""smg, a router written in Rust, in front of a fleet of pdserve, over vLLM's gRPC service: its answers are the fleet's own.

    .venv/bin/python scripts/interop/smg.py [--environment FOLDER]

Installs smg into an environment of its own (37 MB), by default a temporary one. See docs/interop.md.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import httpx

from pdserve.cli.deployment import Deployment, free_port
from pdserve.config import UpConfig
from pdserve.lines.event_stream import read_events

QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}
REQUESTS = (
    ("/v1/chat/completions", QUESTION),
    ("/v1/chat/completions", {**QUESTION, "stop": ["is"]}),
    ("/v1/completions", {"prompt": "The capital of Italy is", "max_tokens": 8}),
)


def install(folder: Path) -> str:
    """Return smg's command, and its version for the report."""
    if not (folder / "bin" / "smg").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", "smg"], check=True)
    shown = subprocess.run([folder / "bin" / "pip", "show", "smg"], check=True, capture_output=True, text=True).stdout
    print(shown.splitlines()[1].replace("Version:", "smg"))
    return str(folder / "bin" / "smg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path)
    given = parser.parse_args().environment
    with tempfile.TemporaryDirectory() as temporary:
        command = install(given or Path(temporary))
        grpc_port, port, metrics_port = free_port(), free_port(), free_port()
        config = UpConfig(port=free_port(), grpc_port=grpc_port, threads=1, kv_cache_memory="64MiB")
        with Deployment(config, lambda line: None) as fleet:
            fleet.wait_ready()
            worker, ports = (
                f"grpc://127.0.0.1:{grpc_port}",
                ["--port", str(port), "--prometheus-port", str(metrics_port)],
            )
            launch = [command, "launch", "--host", "127.0.0.1", *ports, "--worker-urls", worker, "--log-level", "error"]
            router = subprocess.Popen(launch, stdout=subprocess.DEVNULL)
            try:
                compare(f"http://127.0.0.1:{port}", fleet.url)
            finally:
                router.terminate()
                router.wait()


def compare(smg: str, pdserve: str) -> None:
    """Exit with an error unless both give the same answers, whole and streamed."""
    deadline = time.monotonic() + 300
    while not is_ready(smg):
        if time.monotonic() > deadline:
            sys.exit("smg does not list the model")
        time.sleep(0.2)
    for path, body in REQUESTS:
        for stream in (False, True):
            texts = [text_of(url + path, {**body, "model": "demo", "temperature": 0}, stream) for url in (smg, pdserve)]
            print(f"{path} {'stream' if stream else 'whole '} {texts[0]!r}")
            if texts[0] != texts[1]:
                sys.exit(f"without smg the answer is {texts[1]!r}")


def is_ready(url: str) -> bool:
    try:
        return any(card["id"] == "demo" for card in httpx.get(f"{url}/v1/models").json()["data"])
    except httpx.TransportError:
        return False


def text_of(url: str, body: dict[str, object], stream: bool) -> str:
    reply = httpx.post(url, json={**body, "stream": stream}, timeout=300).raise_for_status()
    if not stream:
        [choice] = reply.json()["choices"]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    events = [data for data in read_events([reply.content]) if data != "[DONE]"]
    choices = [choice for data in events for choice in httpx.Response(200, text=data).json()["choices"]]
    return "".join(choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices)


if __name__ == "__main__":
    main()
