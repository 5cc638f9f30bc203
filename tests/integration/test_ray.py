"""`pdserve up --on ray` on a real Ray of two nodes, both on this machine."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.up import deployment_of
from pdserve.config import UpConfig
from pdserve.errors import SetupError
from pdserve.launchers.launcher import Launcher

PROMPTS = [[i, 7, 9] * (4 + 20 * (i % 3)) for i in range(9)]
TOKENS = 300
NODE = {"node_ip_address": "127.0.0.1", "num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, without usage statistics and the wait for a dashboard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"
        )  # the setting by which Ray stays on the loopback interface
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # with Ray's 15, instances starve beside other tests
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
        yield pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")


@pytest.fixture(scope="module")
def cluster(ray: Any) -> Iterator[Any]:
    """Two nodes with one CPU each, to which this process is connected as `pdserve up` would be."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def config_of(path: Path, redis_url: str, **settings: Any) -> UpConfig:
    store = f"{redis_url}?timeout=600"
    return UpConfig(on="ray", model=str(path), port=free_port(), connector=store, num_blocks=512, **settings)


@contextmanager
def running(config: UpConfig) -> Iterator[tuple[Deployment, list[str]]]:
    """Run a deployment, and yield it once it is ready, with the lines of its output, which are shown if the test fails."""
    lines: list[str] = []
    try:
        with deployment_of(config, lines.append) as deployment:
            deployment.wait_ready(600)
            yield deployment, lines
    except BaseException:
        print("\n".join(lines))
        raise


def instances(deployment: Deployment) -> dict[str, dict[str, Any]]:
    found = httpx.get(f"{deployment.url}/debug/instances").json()["instances"]
    return {instance["instance_id"]: instance for instance in found}


def is_removed(deployment: Deployment, name: str) -> bool:
    deployment.check_children()
    return name not in [child.name for child in deployment.children]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.slow
def test_actors_serve_the_same_tokens_and_are_replaced_and_scaled(
    ray: Any,
    cluster: Any,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    complete_all: Callable[..., list[list[int]]],
    wait_until: Callable[..., None],
    redis_url: str,
) -> None:
    path = checkpoint("llama")
    expected = generate(path, PROMPTS, TOKENS)
    config = config_of(path, redis_url, local_prefill_tokens=0)
    with running(config) as (deployment, lines), ThreadPoolExecutor(1) as thread:
        nodes = {
            actor["Address"]["NodeID"] for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"
        }
        assert len(nodes) == 2, "one on each node"
        assert complete_all(deployment, PROMPTS, max_tokens=TOKENS) == expected

        victim = deployment.child("decode-0")
        actor, process = victim.process, children(victim.pid)
        streams = thread.submit(complete_all, deployment, PROMPTS, max_tokens=TOKENS)
        wait_until(lambda: instances(deployment)["decode-0"]["requests"] >= 2, "decode-0 is busy")
        os.kill(victim.pid, signal.SIGKILL)
        assert streams.result(600) == expected, "prefill-0 serves both roles meanwhile"
        wait_until(lambda: not any(map(is_running, process)), "its process ends with the actor")
        wait_until(deployment.poll_ready, "the actor is replaced")
        assert victim.process is not actor and victim.failures == 1
        assert complete_all(deployment, PROMPTS[:3], max_tokens=TOKENS) == expected[:3]

        launcher: Launcher = deployment
        streams = thread.submit(complete_all, deployment, PROMPTS, max_tokens=TOKENS)
        wait_until(lambda: instances(deployment)["decode-0"]["requests"] >= 2, "decode-0 is busy")
        launcher.stop("decode-0")
        wait_until(lambda: is_removed(deployment, "decode-0"), "it drains and ends")
        assert streams.result(600) == expected
        launcher.start("decode")
        wait_until(deployment.poll_ready, "decode-1 serves on the place of decode-0")
        assert set(instances(deployment)) == {"prefill-0", "decode-1"}
        assert complete_all(deployment, PROMPTS[:3], max_tokens=8) == [tokens[:8] for tokens in expected[:3]]
        logs = Path(ray._private.worker._global_node.get_logs_dir_path()).glob("worker-*.out")
        assert any("decode-1: " in log.read_text() for log in logs), "Ray has the output of instances"
    assert not [line for line in lines if "killed" in line], "all ended by themselves"
    wait_until(lambda: ray.available_resources().get("CPU") == 2, "all resources are given back")


@pytest.mark.slow
def test_ranks_of_an_actor_share_a_bundle(
    ray: Any,
    cluster: Any,
    checkpoint: Callable[..., Path],
    generate: Callable[..., list[list[int]]],
    complete_all: Callable[..., list[list[int]]],
    wait_until: Callable[..., None],
    redis_url: str,
) -> None:
    """Two ranks get two CPUs of one node, end with their actor, and come back with it."""
    path = checkpoint("llama")
    expected = generate(path, PROMPTS, 32)
    config = config_of(path, redis_url, tensor_parallel_size=2, prefill=0, decode=0, both=1)
    with pytest.raises(SetupError, match=r"has fewer than 2 CPUs, one per rank, for each of 1 instances$"):
        deployment_of(config, print)
    node = cluster.add_node(**{**NODE, "num_cpus": 2})
    try:
        wait_until(lambda: ray.available_resources().get("CPU") == 4)
        with running(config) as (deployment, _):
            assert instances(deployment)["both-0"]["ranks"] == 2
            assert complete_all(deployment, PROMPTS, max_tokens=32) == expected
            places = [actor for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]
            assert [place["Address"]["NodeID"] for place in places] == [node.node_id]
            assert ray.available_resources()["CPU"] == 2, "each rank has a CPU"
            victim = deployment.child("both-0")
            actor, (leader,) = victim.process, children(victim.pid)
            (follower,) = children(leader)
            os.kill(victim.pid, signal.SIGKILL)
            wait_until(lambda: not is_running(leader) and not is_running(follower), "both ranks end with the actor")
            wait_until(lambda: deployment.poll_ready() and victim.process is not actor, "the actor is replaced")
            assert complete_all(deployment, PROMPTS[:3], max_tokens=32) == expected[:3]
    finally:
        cluster.remove_node(node)


@pytest.mark.slow
def test_shared_memory_needs_one_node(cluster: Any) -> None:
    with pytest.raises(
        SetupError, match=r"no CPU for each of 2 instances; shm:// keeps .*: --connector redis://, nixl://"
    ):
        deployment_of(UpConfig(on="ray"), print)


@pytest.mark.slow
def test_more_instances_than_fit_are_refused(cluster: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.launchers.ray_cluster.PLACEMENT_TIMEOUT_S", 5.0)
    with pytest.raises(SetupError, match=r"no room for one more instance with {'CPU': 1}$"):
        deployment_of(UpConfig(on="ray", threads=1, decode=2, connector=redis_url), print)


@pytest.mark.slow
def test_within_a_placement_group_instances_get_its_bundles(ray: Any, cluster: Any) -> None:
    from pdserve.launchers.ray_cluster import RayCluster

    group = ray.util.placement_group([{"CPU": 0.5}, {"CPU": 1}], strategy="SPREAD")
    assert group.wait(600)

    @ray.remote(num_cpus=0.5)  # type: ignore[untyped-decorator]
    def place_two() -> list[Any]:
        places = RayCluster(1, None, gpus=1, one_node=False)
        first = places.place()
        try:
            places.place()
        except SetupError as error:
            return [first.index, first.group == ray.util.get_current_placement_group(), places.bundle, str(error)]
        raise AssertionError

    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    outcome = ray.get(place_two.options(scheduling_strategy=strategy).remote())
    assert outcome == [1, True, {"CPU": 1}, "the placement group of this process has no free bundle with {'CPU': 1}"]
    ray.util.remove_placement_group(group)


def test_cpus_are_shared_such_that_all_instances_fit(ray: Any) -> None:
    from pdserve.launchers.ray_cluster import share_cpus

    assert share_cpus([8.0], 2) == 4
    assert share_cpus([3.0, 3.0], 3) == 1, "with 2, only two instances would fit"
    assert share_cpus([64.0, 0.0, 2.0], 1) == 64
    assert share_cpus([1.0, 0.5], 2) == 0 == share_cpus([], 1)


def test_a_missing_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pdserve.launchers.ray_cluster", "pdserve.launchers.ray_actor"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SetupError, match=r"^--on ray needs Ray, which is not installed: pip install -e '\.\[ray\]'$"):
        deployment_of(UpConfig(on="ray"), print)


def test_an_address_without_a_cluster_is_one_line(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # as the slow tests leave it otherwise
    port = free_port()
    for address, reason in (
        (f"127.0.0.1:{port}", "no Ray cluster answers there: Connection refused"),
        ("ray://127.0.0.1:10001", "Ray Client does not suffice"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(SetupError, match=f"^RAY_ADDRESS={address}: {reason}"):
            deployment_of(UpConfig(on="ray"), print)
