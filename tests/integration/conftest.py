"""Fixtures of the integration tests: deployments in real processes, and single instances driven step by step."""

import os
import re
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import torch

from pdserve.cli.deployment import Deployment, free_port
from pdserve.config import InstanceConfig, UpConfig
from pdserve.instance.instance import Instance
from pdserve.kv_transfer.connector import Connector
from pdserve.kv_transfer.connectors.shm.connector import unlink
from pdserve.kv_transfer.header import Buffer
from pdserve.kv_transfer.threaded import ThreadedConnector
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from tests.outputs import outputs_of
from tests.waiting import wait_until

Deploy = Callable[..., AbstractContextManager[Deployment]]

# Long enough for any busy machine: only a hang takes 10 minutes. Tests of timeouts and leases set their own.
PATIENT_ROUTER = [
    "--instance-timeout-seconds",
    "600",
    "--handover-timeout-seconds",
    "600",
    "--client-timeout-seconds",
    "600",
]
PATIENT_STORE = "timeout=600"


@pytest.fixture(scope="module", autouse=True)
def single_torch_thread() -> Iterator[None]:
    """Limit torch to one thread: the steps in this process are small, and it shares the cores with others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as integration tests."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("integration")


@pytest.fixture(scope="session")
def forked_deployment(fork_server: Any) -> type[Deployment]:
    """A Deployment class whose processes come from the fork server; `flags` and `programs` as in `deploy`."""

    class ForkedDeployment(Deployment):
        flags: ClassVar[dict[str, list[str]]] = {}
        programs: ClassVar[dict[str, list[str]]] = {}

        def _spawn(self, arguments: list[str], environment: dict[str, str]) -> Any:
            arguments, program = [*arguments, *self.flags.get(arguments[0], [])], self.programs.get(arguments[0])
            return fork_server.spawn([*(program or ()), *arguments], environment)

    return ForkedDeployment


@pytest.fixture(scope="session")
def deploy(forked_deployment: type[Deployment], checkpoint: Callable[..., Path]) -> Deploy:
    """`with deploy(model=path, prefill=2) as deployment:` runs a router and instances; prints their output on a failure.

    Without a model, one with random weights is served under the name of the demo model, which takes a second to load.

    `flags={"decode": ["--block-size", "64"]}` adds command-line flags to the instances of a role, or to the router;
    `programs={"decode": ["oracle.py"]}` runs a program of the test in place of pdserve, with the same arguments;
    output lines are appended to the list `log_lines`; `wait=False` yields before the deployment is ready.
    """

    @contextmanager
    def run(
        *,
        flags: dict[str, list[str]] | None = None,
        programs: dict[str, list[str]] | None = None,
        log_lines: list[str] | None = None,
        wait: bool = True,
        **settings: Any,
    ) -> Iterator[Deployment]:
        log_lines, flags, segment = (
            [] if log_lines is None else log_lines,
            flags or {},
            f"shm://test-{uuid.uuid4().hex}",
        )
        defaults = {
            "port": free_port(),
            "threads": 1,
            "local_prefill_tokens": 0,
            # Clearing larger ones takes longer than all else.
            "connector": f"{segment}?size=32MiB&{PATIENT_STORE}",
            "kv_cache_memory": "16MiB",
        }
        if "model" not in settings:
            defaults |= {"model": str(checkpoint("llama")), "served_model_name": "demo"}
        all_flags = {**flags, "router": [*PATIENT_ROUTER, *flags.get("router", [])]}
        deployment_class = type(
            "FlaggedDeployment", (forked_deployment,), {"flags": all_flags, "programs": programs or {}}
        )
        with ExitStack() as stack:
            stack.callback(unlink, segment)
            config = UpConfig(**{**defaults, **settings})
            deployment = stack.enter_context(deployment_class(config, on_line=log_lines.append))
            try:
                if wait:
                    deployment.wait_ready(600)
                yield deployment
            except BaseException:
                print("\n".join(log_lines))
                raise

    return run


class InstanceDriver:
    """One instance without threads or a router: the test runs its engine steps and collects its outputs."""

    def __init__(self, config: InstanceConfig, connector: Connector | None = None) -> None:
        self.outputs: list[Output] = []
        self.instance = Instance(config, lambda _, frame: self.outputs.extend(outputs_of(frame)), connector)

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, phase: "pb.Phase", **fields: Any) -> None:
        """`fields` are those of a `Request` or of its `Submit`."""
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        of_request = {name: fields.pop(name) for name in Request.__struct_fields__ if name in fields}
        request = Request(prompt=prompt, sampling=sampling, **of_request).pack()
        message = pb.Submit(request_id=request_id, phase=phase, request=request, **fields)
        self.instance.submit("router", message)

    def run_until(self, done: Callable[[list[Output]], bool]) -> None:
        """Run steps until `done(outputs so far)` is true."""
        idle = True
        for _ in range(2000):
            if done(self.outputs):
                return
            idle = self.instance.run_once(wait=idle)
        raise AssertionError(f"not done: {self.outputs}")

    def run_until_idle(self) -> None:
        """Run steps until every request has been released."""
        while self.instance.num_jobs:
            self.instance.run_once(wait=not self.instance.engine.has_work)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.token_ids]


@pytest.fixture
def make_instance() -> Iterator[Callable[..., InstanceDriver]]:
    """make_instance(model=path, connector=url) → an instance in this process, whose steps the test runs."""
    drivers: list[InstanceDriver] = []

    def make(connector_object: Connector | None = None, **settings: Any) -> InstanceDriver:
        drivers.append(InstanceDriver(InstanceConfig(**settings), connector_object))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.instance.close()


class ControlledStore(ThreadedConnector):
    """In-process store with hooks: `before_put` and `before_get` run before each block and may block or raise."""

    scheme = "controlled"

    def __init__(
        self,
        *,
        values: dict[str, bytes] | None = None,
        before_put: Callable[[], object] = lambda: None,
        before_get: Callable[[], object] = lambda: None,
        query: str = f"{PATIENT_STORE}&threads=1",
    ) -> None:
        super().__init__(f"controlled://?{query}")
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
def controlled_store() -> type[ControlledStore]:
    return ControlledStore


@pytest.fixture(scope="session")
def redis_url(redis_server: Any) -> str:
    """URL of a real redis-server on a free port."""
    return str(redis_server.url)


@pytest.fixture
def shm_url() -> Iterator[str]:
    """URL of a shared-memory store for this test only."""
    url = f"shm://test-{uuid.uuid4().hex}?size=16MiB&{PATIENT_STORE}"
    yield url
    unlink(url)


@pytest.fixture
def connector_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a store of the kind given by indirect parametrisation; `shm?codec=zstd` adds a codec.

    If the connector is a separate package, the processes that the test starts have it on their path.
    """
    kind, mark, query = request.param.partition("?")
    query = PATIENT_STORE + mark.replace("?", "&") + query
    files, memory = f"file://{tmp_path / 'kv'}", f"shm://test-{uuid.uuid4().hex}"
    if kind == "shm":
        url = f"{memory}?size=64MiB&{query}"
    elif kind == "file":
        url = f"{files}?{query}"
    elif kind == "tiered":
        url = f"tiered://{memory}?size=1MiB&{query},{files}?{query}"  # the first tier is too small for the data
    elif kind == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed: pip install -e '.[nixl]'")
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
    """metric(deployment, "kv_transfer_blocks_total", role="decode") → sum of all series with these labels."""

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
    """complete(deployment, prompt=[1, 2], max_tokens=4) → the JSON of /v1/completions, with token ids."""

    def run(deployment: Deployment, **body: Any) -> dict[str, Any]:
        defaults = {"model": deployment.config.name, "return_token_ids": True, "temperature": 0}
        reply = httpx.post(f"{deployment.url}/v1/completions", json={**defaults, **body})
        assert reply.status_code == 200, reply.text
        result: dict[str, Any] = reply.json()
        return result

    return run


@pytest.fixture(scope="session")
def complete_all(complete: Callable[..., dict[str, Any]]) -> Callable[..., list[list[int]]]:
    """complete_all(deployment, prompts) → greedy tokens of each prompt (32 by default); requests are concurrent."""

    def run(deployment: Deployment, prompts: list[list[int]], **body: Any) -> list[list[int]]:
        body = {"max_tokens": 32, "ignore_eos": True, **body}
        with ThreadPoolExecutor(len(prompts)) as threads:
            replies = threads.map(lambda prompt: complete(deployment, prompt=prompt, **body), prompts)
            return [reply["choices"][0]["token_ids"] for reply in replies]

    return run


@pytest.fixture(scope="session")
def stop_busy() -> Callable[..., list[Future[Any]]]:
    """stop_busy(deployment, "decode-0", send) → the futures that `send()` returned, once this instance has 2 of the requests.

    It is stopped then by SIGSTOP, and so cannot end them before the test goes on. If they have ended before this process got
    a core to look, they are sent again.
    """

    def stop(deployment: Deployment, name: str, send: Callable[[], list[Future[Any]]]) -> list[Future[Any]]:
        def is_busy() -> bool:
            found = httpx.get(f"{deployment.url}/debug/instances").json()["instances"]
            return any(one["instance_id"] == name and one["requests"] >= 2 for one in found)

        while True:
            answers = send()
            wait_until(lambda: is_busy() or all(answer.done() for answer in answers), f"{name} is busy")  # noqa: B023
            os.kill(deployment.child(name).pid, signal.SIGSTOP)
            if is_busy():
                return answers
            os.kill(deployment.child(name).pid, signal.SIGCONT)
            for answer in answers:
                answer.result(600)

    return stop


@pytest.fixture(scope="session", name="wait_until")
def wait_until_fixture() -> Callable[..., None]:
    """wait_until(condition, "description") polls; counters, for example, arrive with the next heartbeat."""
    return wait_until


@pytest.fixture(scope="session")
def loads_all_kv(
    complete_all: Callable[..., list[list[int]]],
    metric: Callable[..., float],
    wait_until: Callable[..., None],
    blocks_held: Callable[[Deployment], dict[str, float]],
) -> Callable[..., None]:
    """loads_all_kv(deployment, prompts, expected) checks tokens, and that decode computes no prompt, cold and then warm.

    With has_window=True, tokens that no window reaches are not loaded, and not counted.
    """

    def check(
        deployment: Deployment, prompts: list[list[int]], expected: list[list[int]], has_window: bool = False
    ) -> None:
        length, longest = sum(map(len, prompts)), max(map(len, prompts))
        tokens = partial(metric, deployment, "prompt_tokens_by_source_total", role="decode")
        assert complete_all(deployment, prompts) == expected
        wait_until(lambda: has_window or tokens(source="loaded") + tokens(source="local_hit") == length)
        assert tokens(source="computed") == 0, "all KV was loaded, none recomputed"
        assert complete_all(deployment, prompts) == expected, "with warm caches"
        wait_until(lambda: has_window or tokens() == 2 * length)
        assert has_window or tokens(source="local_hit") >= 16 * (longest // 16), "exact KV enters the prefix cache"
        assert tokens(source="computed") == 0
        wait_until(lambda: not any(blocks_held(deployment).values()))

    return check


@pytest.fixture
def start(fork_server: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """start("router", "--port", "0") → the running command, killed at the end of the test."""
    with (tmp_path / "output").open("w") as output:
        running: list[Any] = []

        def run(*arguments: str) -> Any:
            running.append(fork_server.start(list(arguments), os.environ, output.fileno(), output.fileno()))
            return running[-1]

        yield run
        for process in running:
            process.kill()
    print((tmp_path / "output").read_text())


@pytest.fixture(scope="session")
def blocks_held() -> Callable[[Deployment], dict[str, float]]:
    """blocks_held(deployment) → held blocks and running requests, summed over all instances, from /metrics."""

    def read(deployment: Deployment) -> dict[str, float]:
        totals = {"pdserve_kv_cache_blocks_held": 0.0, "pdserve_num_requests_running": 0.0}
        for line in httpx.get(f"{deployment.url}/metrics").text.splitlines():
            name = line.split("{")[0]
            if name in totals:
                totals[name] += float(line.rsplit(" ", 1)[1])
        return totals

    return read
