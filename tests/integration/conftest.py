"""Whole deployments in real processes, by fixture."""

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import torch

from pdserve.cli.deployment import Deployment, free_port
from pdserve.config import InstanceConfig, UpConfig
from pdserve.instance.engine_loop import Instance
from pdserve.kv_transfer.connector import Connector
from pdserve.kv_transfer.connectors.shm import unlink
from pdserve.kv_transfer.header import Buffer
from pdserve.kv_transfer.threaded import ThreadedConnector
from pdserve.proto import pdserve_pb2 as pb

Deploy = Callable[..., AbstractContextManager[Deployment]]

# However slow the machine is, nothing but a hang takes so long. Tests of time-outs and leases bring their own.
PATIENT_ROUTER = ["--lease-seconds", "600", "--handover-timeout-seconds", "600", "--client-timeout-seconds", "600"]
PATIENT_STORE = "timeout=600"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The steps that this process computes are small, and it is not alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is in this folder."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("integration")


@pytest.fixture(scope="session")
def forked(fork_server: Any) -> type[Deployment]:
    """A deployment whose processes the fork server makes; `flags` as in `deploy`."""

    class Mixed(Deployment):
        flags: ClassVar[dict[str, list[str]]] = {}

        def _spawn(self, arguments: list[str], environment: dict[str, str]) -> Any:
            return fork_server.spawn([*arguments, *self.flags.get(arguments[0], [])], environment)

    return Mixed


@pytest.fixture(scope="session")
def deploy(forked: type[Deployment]) -> Deploy:
    """`with deploy(model=path, prefill=2) as deployment:` a running router and instances; what they said on a failure.

    `flags={"decode": ["--block-size", "64"]}` adds to what the instances of a role, or the router, are started with;
    `said` is a list to which what they say is added; `wait=False` gives them before they are ready.
    """

    @contextmanager
    def run(
        *, flags: dict[str, list[str]] | None = None, said: list[str] | None = None, wait: bool = True, **settings: Any
    ) -> Iterator[Deployment]:
        said, flags, own = [] if said is None else said, flags or {}, f"shm://test-{uuid.uuid4().hex}"
        given = {"port": free_port(), "threads": 1, "local_prefill_tokens": 0, "connector": f"{own}?{PATIENT_STORE}"}
        kind = type("Mixed", (forked,), {"flags": {**flags, "router": [*PATIENT_ROUTER, *flags.get("router", [])]}})
        with kind(UpConfig(**{**given, **settings}), say=said.append) as deployment:
            try:
                if wait:
                    deployment.wait_ready(600)
                yield deployment
            except BaseException:
                print("\n".join(said))
                raise
        unlink(own)

    return run


class InstanceContext:
    """One instance without its threads: frames are collected, turns are taken by hand."""

    def __init__(self, config: InstanceConfig, connector: Connector | None = None) -> None:
        self.outputs: list[pb.Output] = []
        self.instance = Instance(config, lambda _, frame: self.outputs.extend(frame.step.outputs), connector)

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, phase: "pb.Phase", **fields: Any) -> None:
        sampling = pb.Sampling(max_tokens=max_tokens, top_p=1, ignore_eos=True)
        message = pb.Submit(request_id=request_id, phase=phase, prompt=prompt, sampling=sampling, **fields)
        self.instance.submit("router", message)

    def until(self, done: Callable[[list[pb.Output]], bool]) -> None:
        """Takes turns until the outputs so far are as they should be."""
        idle = True
        for _ in range(2000):
            if done(self.outputs):
                return
            idle = self.instance.run_once(wait=idle)
        raise AssertionError(f"not done: {self.outputs}")

    def until_idle(self) -> None:
        """Takes turns until nothing of any request is left."""
        while self.instance.num_jobs:
            self.instance.run_once(wait=not self.instance.engine.has_work)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.token_ids]


@pytest.fixture
def context() -> Iterator[Callable[..., InstanceContext]]:
    """desk(model=path, connector=url) → an instance in this process, to be moved on by hand."""
    desks: list[InstanceContext] = []

    def make(connector_object: Connector | None = None, **settings: Any) -> InstanceContext:
        desks.append(InstanceContext(InstanceConfig(**settings), connector_object))
        return desks[-1]

    yield make
    for one in desks:
        one.instance.layout_converter.close()
        one.instance.connector.close()


class StoreInHand(ThreadedConnector):
    """A store in this process, whose answers a test can delay: `before_put` and `before_get` may wait or raise."""

    scheme = "inhand"

    def __init__(
        self,
        *,
        values: dict[str, bytes] | None = None,
        before_put: Callable[[], object] = lambda: None,
        before_get: Callable[[], object] = lambda: None,
        query: str = f"{PATIENT_STORE}&threads=1",
    ) -> None:
        super().__init__(f"inhand://?{query}")
        self.values = {} if values is None else values
        self.puts = 0
        self._before_put = before_put
        self._before_get = before_get

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        self.puts += 1
        self._before_put()
        self.values[name] = header + bytes(payload)

    def get(self, name: str) -> Buffer | None:
        self._before_get()
        return self.values.get(name)

    def contains(self, name: str) -> bool:
        return name in self.values

    def delete(self, name: str) -> None:
        self.values.pop(name, None)


@pytest.fixture(scope="session")
def store_in_hand() -> type[StoreInHand]:
    return StoreInHand


@pytest.fixture(scope="session")
def redis_url(redis_server: Any) -> str:
    """A real redis-server on a free port."""
    return str(redis_server.url)


@pytest.fixture
def shm_url() -> Iterator[str]:
    """A segment of its own."""
    url = f"shm://test-{uuid.uuid4().hex}?size=16MiB&{PATIENT_STORE}"
    yield url
    unlink(url)


@pytest.fixture
def connector_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL for the kind of store given by indirect parametrisation; `shm?codec=zstd` gives it a codec.

    Where its connector is a package of its own, processes that the test starts find it.
    """
    kind, mark, query = request.param.partition("?")
    query = PATIENT_STORE + mark.replace("?", "&") + query
    files, memory = f"file://{tmp_path / 'kv'}", f"shm://test-{uuid.uuid4().hex}"
    if kind == "shm":
        url = f"{memory}?size=64MiB&{query}"
    elif kind == "file":
        url = f"{files}?{query}"
    elif kind == "tiered":
        url = f"tiered://{memory}?size=1MiB&{query},{files}?{query}"  # too small for what goes through it
    elif kind == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'pdserve[nixl]'")
        url = f"nixl://?{query}"
    elif kind == "fsspec":
        site = request.getfixturevalue("fsspec_package")
        monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        url = f"fsspec+{files}?{query}"
    elif kind == "mooncake":
        url = f"{request.getfixturevalue('mooncake').url}?{query}"
    elif kind == "redis+unix":
        url = f"redis+unix://{request.getfixturevalue('redis_server').socket}?{query}"
    elif kind == "redis+cluster":
        url = f"{request.getfixturevalue('redis_cluster').url}?{query}"
    else:
        assert kind == "redis"
        url = f"{request.getfixturevalue('redis_url')}?{query}"
    yield url
    unlink(memory)
    shutil.rmtree(tmp_path / "kv", ignore_errors=True)


@pytest.fixture(scope="session")
def metric() -> Callable[..., float]:
    """metric(deployment, "kv_transfer_blocks_total", role="decode") → the sum over all series with these labels."""

    def read(deployment: Deployment, name: str, **labels: str) -> float:
        total = 0.0
        for line in httpx.get(f"{deployment.url}/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            found = set(re.findall(r'(\w+)="([^"]*)"', series))
            if series.startswith(f"pdserve_{name}{{") and labels.items() <= found:
                total += float(value)
        return total

    return read


@pytest.fixture(scope="session")
def complete() -> Callable[..., dict[str, Any]]:
    """complete(deployment, prompt=[1, 2], max_tokens=4) → the JSON of /v1/completions, token ids included."""

    def run(deployment: Deployment, **body: Any) -> dict[str, Any]:
        defaults = {"model": deployment.config.name, "return_token_ids": True, "temperature": 0}
        reply = httpx.post(f"{deployment.url}/v1/completions", json={**defaults, **body})
        assert reply.status_code == 200, reply.text
        result: dict[str, Any] = reply.json()
        return result

    return run


@pytest.fixture(scope="session")
def complete_all(complete: Callable[..., dict[str, Any]]) -> Callable[..., list[list[int]]]:
    """complete_all(deployment, prompts) → the greedy tokens of each, 32 unless told, all asked for at once."""

    def run(deployment: Deployment, prompts: list[list[int]], **body: Any) -> list[list[int]]:
        body = {"max_tokens": 32, "ignore_eos": True, **body}
        with ThreadPoolExecutor(len(prompts)) as threads:
            replies = threads.map(lambda prompt: complete(deployment, prompt=prompt, **body), prompts)
            return [reply["choices"][0]["token_ids"] for reply in replies]

    return run


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """until(condition, "what it says") waits for what is soon true: counts, for one, come with heartbeats."""

    def wait(holds: Callable[[], bool], what: object = "", seconds: float = 600.0) -> None:
        give_up = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < give_up, f"not within {seconds:g} s: {what}"
            time.sleep(0.02)

    return wait


@pytest.fixture
def start(fork_server: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """start("router", "--port", "0") → the running command, which is killed in the end."""
    with (tmp_path / "output").open("w") as output:
        running: list[Any] = []

        def run(*arguments: str) -> Any:
            running.append(fork_server.start(list(arguments), os.environ, output.fileno(), output.fileno()))
            return running[-1]

        yield run
        for one in running:
            one.kill()
    print((tmp_path / "output").read_text())


@pytest.fixture(scope="session")
def blocks_held() -> Callable[[Deployment], dict[str, float]]:
    """Held blocks and running requests over all instances, from /metrics."""

    def read(deployment: Deployment) -> dict[str, float]:
        totals = {"pdserve_kv_cache_blocks_held": 0.0, "pdserve_num_requests_running": 0.0}
        for line in httpx.get(f"{deployment.url}/metrics").text.splitlines():
            name = line.split("{")[0]
            if name in totals:
                totals[name] += float(line.rsplit(" ", 1)[1])
        return totals

    return read
