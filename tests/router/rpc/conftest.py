"""Fixture: the router's gRPC server on an event loop of its own, on top of a scripted backend."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config import RouterConfig
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.rpc.server import make_server
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

Serve = Callable[..., AbstractContextManager[int]]


@pytest.fixture
def serve(tokenizer: Tokenizer, tokenizer_dir: Path, backend: ScriptedBackend, metrics: Metrics) -> Serve:
    """`with serve(**settings) as port` runs the server on an event loop of its own; `grammars` checks them."""

    @contextmanager
    def run(grammars: Any = None, **settings: Any) -> Iterator[int]:
        (tokenizer_dir / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
        config = RouterConfig(model=str(tokenizer_dir), served_model_name="demo", **settings)
        admission = AdmissionController(
            load_api_keys(config.api_key, config.keys_file), config, metrics, time.monotonic
        )
        loop, ports, stop = asyncio.new_event_loop(), [], asyncio.Event()

        async def main() -> None:
            server = make_server(config, 0, tokenizer, backend, admission, grammars)
            await server.start()
            ports.append(server.port)
            started.set()
            await stop.wait()
            await server.close()

        started = threading.Event()
        thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
        thread.start()
        try:
            assert started.wait(600)
            yield ports[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(600)
            loop.close()

    return run
