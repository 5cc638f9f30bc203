"""The kit: sound connectors pass, each broken one is caught by the right rule; and what is built around it."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.errors import SetupError
from pdserve.kv_transfer import conformance
from pdserve.kv_transfer.bench import figures, parse_counts
from pdserve.kv_transfer.conformance import RULES, Verdict, check, declared_version, name_of, rules_named, try_rule
from pdserve.kv_transfer.connectors import memory, shm, shm_segment
from pdserve.kv_transfer.rules import behaviour, context
from pdserve.kv_transfer.rules.context import new_keys

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent

Install = Callable[[Path, str, Path, dict[str, str]], None]


def load_broken() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pdserve_broken", HERE / "broken.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pdserve_broken"] = module
    spec.loader.exec_module(module)
    return module


broken = load_broken()
BROKEN: list[tuple[type, str, str]] = broken.BROKEN


@pytest.fixture(scope="module")
def broken_package(tmp_path_factory: pytest.TempPathFactory, install_connectors: Install) -> Iterator[Path]:
    """Makes `broken-<class>://` URLs of the broken connectors, for this process and those that it starts."""
    folder = tmp_path_factory.mktemp("broken")
    install_connectors(
        folder, "pdserve_broken", HERE / "broken.py", {f"broken-{c.__name__.lower()}": c.__name__ for c, _, _ in BROKEN}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture
def room() -> str:
    return "270MiB"  # so that blocks of 8 MiB fit, and the limit is below what the kit tries


def test_each_rule_has_a_broken_connector() -> None:
    assert {rule for _, rule, _ in BROKEN} == {name_of(rule) for rule in RULES}


@pytest.mark.parametrize(("connector", "rule", "said"), BROKEN, ids=[f"{c.__name__}-{rule}" for c, rule, _ in BROKEN])
@pytest.mark.usefixtures("broken_package")
def test_broken_connectors_are_caught(
    connector: type, rule: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if connector in broken.NEVER:
        monkeypatch.setattr(context, "GRACE_S", 3.0)
        for module in (context, behaviour):
            monkeypatch.setattr(module, "WAIT_LIMIT_S", 1.0)
    scheme = f"broken-{connector.__name__.lower()}"
    name = f"/{tmp_path}" if connector.__mro__[1].__name__ == "FileConnector" else f"test-{uuid.uuid4().hex}"
    size = "" if connector.__mro__[1].__name__ == "FileConnector" else "size=48MiB&"
    timeout = 0.3 if rule in ("results", "deadline") else 5
    report = try_rule(rules_named([rule])[0], f"{scheme}://{name}?{size}timeout={timeout}", seconds=0.5)
    memory.unlink(f"{scheme}://{name}")
    assert report.verdict is Verdict.BROKEN, report.detail
    assert said in report.detail, report.detail


def test_sound_connectors_pass(url: str, scheme: str) -> None:
    reports = {one.rule: one for one in check(url, seconds=0.5)}
    assert not [one for one in reports.values() if one.verdict is Verdict.BROKEN]
    not_checked = {one.rule for one in reports.values() if one.verdict is Verdict.NOT_CHECKED}
    endless, alone = {"leases-under-pressure", "capacity"}, {"between-processes", "killed-writer"}
    expected = {"memory": endless | alone, "shm": set(), "file": endless, "redis": endless}
    expected["redis+cluster"] = endless
    assert not_checked == expected[scheme]
    assert (reports["deadline"].detail.startswith("held up and cut by a relay")) == (scheme == "redis")
    assert not any(one.detail.startswith("blocks of") for one in reports.values())  # all sizes were tried


def test_valkey_passes(redis_servers: Any, tmp_path: Path) -> None:
    with closing(redis_servers.RedisServer(tmp_path, program=redis_servers.VALKEY)) as server:
        reports = {one.rule: one for one in check(f"redis+unix://{server.socket}", seconds=0.3)}
    left_out = {rule: one.detail for rule, one in reports.items() if one.verdict is not Verdict.HOLDS}
    assert set(left_out) == {"leases-under-pressure", "capacity"}, left_out


def test_a_relay_that_is_passed_by_is_seen(redis_cluster: Any) -> None:
    """A node of a cluster sends us past the relay to the others, and to itself."""
    url = f"redis+cluster://127.0.0.1:{redis_cluster.nodes[0].port}"
    report = try_rule(rules_named(["deadline"])[0], url, seconds=0.5)
    assert report.verdict is Verdict.HOLDS and report.detail.startswith("held up in its hooks")


def test_tiers_of_memory_and_files_pass(tmp_path: Path) -> None:
    name = f"shm://test-{uuid.uuid4().hex}"
    url = f"tiered://{name}?size=64MiB,file://{tmp_path}/kv"
    try:  # files have no limit; tiers that have one are the next test's
        reports = [try_rule(rule, url, seconds=0.5) for rule in RULES if rule not in FULLNESS]
    finally:
        shm.unlink(name)
    assert not {one.rule: one.detail for one in reports if one.verdict is not Verdict.HOLDS}


@pytest.mark.parametrize(
    ("policy", "rule", "verdicts"),
    [
        ("noeviction", "leases-under-pressure", {Verdict.HOLDS}),
        ("allkeys-lru", "leases-under-pressure", {Verdict.NOT_CHECKED}),
        # Whether the union forgets the first block depends on how many went to Redis before memory had forgotten them.
        ("allkeys-lru", "capacity", {Verdict.HOLDS, Verdict.NOT_CHECKED}),
        ("allkeys-lru", "killed-writer", {Verdict.HOLDS}),
    ],
)
def test_tiers_that_are_full(start_redis: Callable[..., Any], policy: str, rule: str, verdicts: set[Verdict]) -> None:
    server = start_redis("--maxmemory", "60mb", "--maxmemory-policy", policy)
    name = f"shm://test-{uuid.uuid4().hex}"
    try:
        report = try_rule(rules_named([rule])[0], f"tiered://{name}?size=40MiB,{server.url}", seconds=0.5)
    finally:
        shm.unlink(name)
    assert report.verdict in verdicts, report.detail


FULLNESS = rules_named(["leases-under-pressure", "capacity"])


def test_memory_that_is_full() -> None:
    url = f"memory://test-{uuid.uuid4().hex}?size=20MiB"
    assert [try_rule(rule, url).verdict for rule in FULLNESS] == [Verdict.HOLDS] * 2


def test_redis_that_is_full(start_redis: Callable[..., Any]) -> None:
    server = start_redis("--maxmemory", "40mb", "--maxmemory-policy", "noeviction")
    assert [try_rule(rule, server.url).verdict for rule in FULLNESS] == [Verdict.HOLDS] * 2


def test_redis_that_evicts(start_redis: Callable[..., Any]) -> None:
    server = start_redis("--maxmemory", "40mb", "--maxmemory-policy", "allkeys-lru")
    leases, capacity = (try_rule(rule, server.url) for rule in FULLNESS)
    assert leases.verdict is Verdict.NOT_CHECKED and "evicts leased blocks too" in leases.detail
    assert capacity.verdict is Verdict.HOLDS


# Connectors without hooks: what the kit cannot do, it does not claim.

PLAIN = """
from concurrent.futures import Future, wait
from dataclasses import replace

from pdserve.kv_transfer.connector import Connector, Outcome
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.connectors.redis_connector import RedisConnector
from pdserve.kv_transfer.connectors.shm import ShmConnector

class Plain(Connector):
    def __init__(self, url):
        self._inner = MemoryConnector(url)
        for name in ("attach", "store", "load", "match", "release", "stats", "close"):
            setattr(self, name, getattr(self._inner, name))

    attach = store = load = match = release = stats = close = None

Plain.__abstractmethods__ = frozenset()

class Reachable(Plain):
    def tamper(self, key, offset):
        name = self._inner._name(key)
        value = bytearray(self._inner._store.values[name])
        value[64 + offset] ^= 1
        self._inner._store.values[name] = bytes(value)

class PlainRedis(Plain):
    def __init__(self, url):
        self._inner = RedisConnector(url.partition("-")[2])
        for name in ("attach", "store", "load", "match", "release", "stats", "close"):
            setattr(self, name, getattr(self._inner, name))

class GivesUp(PlainRedis):
    def __init__(self, url):
        super().__init__(url)
        self.store = self.store_and_wait

    def store_and_wait(self, keys, block_ids, *, lease_s):
        future = self._inner.store(keys, block_ids, lease_s=lease_s)
        wait([future])
        self._inner.timeout = 0.3  # after the first store, which has to go well
        return future

class Ticketed(MemoryConnector):
    def match(self, keys):
        future = Future()
        future.set_result(0)
        return future

    def _finish_transfer(self, operation, expected=frozenset()):
        result = MemoryConnector._finish_transfer(self, operation, expected)
        return replace(result, ticket=b"here" if operation.kind == "store" else b"")

class TicketedShm(ShmConnector):
    match, _finish_transfer = Ticketed.match, Ticketed._finish_transfer

class Pretends(TicketedShm):
    def get_many(self, blocks):
        for block in blocks:
            block._operation.outcomes[block._index] = Outcome.OK

class Headless(Reachable):
    def tamper(self, key, offset):
        if offset < 0:
            raise LookupError
        super().tamper(key, offset)
"""


@pytest.fixture
def plain_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_connectors: Install) -> None:
    (tmp_path / "source.py").write_text(PLAIN)
    (tmp_path / "site").mkdir()
    names = {"plain": "Plain", "reachable": "Reachable", "headless": "Headless", "ticketed": "Ticketed"}
    names |= {
        "ticketed-shm": "TicketedShm",
        "pretends": "Pretends",
        "plain-redis": "PlainRedis",
        "givesup-redis": "GivesUp",
    }
    install_connectors(tmp_path / "site", "plain_connectors", tmp_path / "source.py", names)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "plain_connectors", raising=False)


@pytest.mark.usefixtures("plain_package")
def test_what_cannot_be_reached_is_not_checked() -> None:
    flipped, foreign, deadline, missing = rules_named(["flipped-bytes", "foreign-namespace", "deadline", "missing"])
    url = f"plain://test-{uuid.uuid4().hex}"
    assert try_rule(missing, url).verdict is Verdict.HOLDS
    assert try_rule(flipped, url).verdict is Verdict.NOT_CHECKED
    assert try_rule(deadline, url).verdict is Verdict.NOT_CHECKED
    report = try_rule(foreign, url)  # what can be checked of it holds, and the rest is named
    assert (
        report.verdict is Verdict.HOLDS and "headers not checked: the connector has no method tamper" in report.detail
    )
    reachable = [try_rule(rule, url.replace("plain", "reachable")) for rule in (flipped, foreign)]
    assert [(one.verdict, one.detail) for one in reachable] == [(Verdict.HOLDS, "")] * 2
    headless = [try_rule(rule, url.replace("plain", "headless")) for rule in (flipped, foreign)]
    assert [one.verdict for one in headless] == [Verdict.HOLDS] * 2
    assert "nothing to tamper with at offset" in headless[1].detail


@pytest.mark.usefixtures("plain_package")
def test_a_caller_of_a_connector_without_hooks_never_waits(start_redis: Callable[..., Any]) -> None:
    """Where the kit can hold up no more than a connection, and sets no time-out."""
    (rule,) = rules_named(["caller-never-waits"])
    assert try_rule(rule, f"plain://test-{uuid.uuid4().hex}").verdict is Verdict.NOT_CHECKED
    server = start_redis()
    sound = try_rule(rule, f"plain-{server.url}")
    assert (sound.verdict, sound.detail) == (Verdict.HOLDS, "held up and cut by a relay")
    gives_up = try_rule(rule, f"givesup-{server.url}")
    assert gives_up.verdict is Verdict.BROKEN and "before they give up on a store that hangs" in gives_up.detail


@pytest.mark.usefixtures("plain_package")
def test_without_a_store_in_between() -> None:
    needs = ["leading-match", "lease", "leases-under-pressure", "capacity", "many-threads"]
    needs_not = ["results", "missing", "foreign-namespace", "release", "cancelled", "counts", "clean-close"]
    url = f"ticketed://test-{uuid.uuid4().hex}"
    for rule in rules_named(needs):
        report = try_rule(rule, url)
        assert report.verdict is Verdict.NOT_CHECKED and "carry tickets" in report.detail, report
    assert [try_rule(rule, url).verdict for rule in rules_named(needs_not)] == [Verdict.HOLDS] * len(needs_not)


@pytest.mark.usefixtures("plain_package")
def test_blocks_that_stay_with_another_process() -> None:
    rules, name = rules_named(["between-processes", "killed-writer"]), f"test-{uuid.uuid4().hex}"
    alone = [try_rule(rule, f"ticketed://{name}") for rule in rules]
    assert [one.verdict for one in alone] == [Verdict.NOT_CHECKED] * 2 and "carry tickets" in alone[0].detail
    sound = [try_rule(rule, f"ticketed-shm://{name}?size=64MiB", seconds=1.0) for rule in rules]
    assert [one.verdict for one in sound] == [Verdict.HOLDS] * 2, [one.detail for one in sound]
    assert "processes killed whose blocks were read" in sound[1].detail
    lies = [try_rule(rule, f"pretends://{name}?size=64MiB", seconds=0.2) for rule in rules]
    assert [one.verdict for one in lies] == [Verdict.BROKEN] * 2 and "wrong bytes in a block" in lies[0].detail
    shm.unlink(f"shm://{name}")


# The guide and the example.


def test_the_connector_of_the_guide_is_conformant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_connectors: Install
) -> None:
    guide = (ROOT / "docs" / "connectors.md").read_text()
    (code,) = (
        block for block in re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S) if "ThreadedConnector" in block
    )
    (tmp_path / "source.py").write_text(code)
    (tmp_path / "site").mkdir()
    install_connectors(tmp_path / "site", "sqlite_connector", tmp_path / "source.py", {"sqlite": "SqliteConnector"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    reports = list(check(f"sqlite://{tmp_path}/kv.db?size=80MiB", seconds=0.5))
    assert [(one.rule, one.detail) for one in reports if one.verdict is not Verdict.HOLDS] == []


def test_the_guide_lists_the_rules_in_their_order() -> None:
    guide = (ROOT / "docs" / "connectors.md").read_text()
    table = guide[guide.index("| rule | tries") : guide.index("A connector whose results")]
    assert re.findall(r"^\| `([a-z-]+)`", table, re.M) == [name_of(rule) for rule in RULES]


def test_the_example_package(tmp_path: Path, fsspec_package: Path) -> None:
    """Installed by pip, elsewhere, and found there by its entry points."""
    shutil.copytree(ROOT / "examples" / "connector_fsspec" / "tests", tmp_path / "tests")
    done = run_pytest(tmp_path, fsspec_package, "-p", "pdserve.kv_transfer.pytest_plugin", "--connector-seconds", "0.5")
    # Not checked: a store without a limit, twice; and memory, which other processes do not see.
    assert "46 passed, 6 skipped" in done.stdout, done.stdout + done.stderr


def test_a_store_that_takes_nothing_is_no_store(command: Callable[..., Any]) -> None:
    error = command("check", "memory://test-none?size=1KiB").exception
    assert isinstance(error, SetupError) and "is full already" in str(error)


def test_rules_that_find_no_room_are_not_checked() -> None:
    (rule,) = rules_named(["many-threads"])
    report = try_rule(rule, f"memory://test-{uuid.uuid4().hex}?size=100KiB")
    assert report.verdict is Verdict.NOT_CHECKED and "no room for 4 more blocks of 32 KiB" in report.detail


# The command.


@pytest.mark.parametrize("scheme", ["redis+unix", "nixl"])
def test_the_command_passes_connectors_that_no_other_test_here_tries(
    scheme: str, request: pytest.FixtureRequest
) -> None:
    needs_store = {"leading-match", "lease", "leases-under-pressure", "capacity", "many-threads", "content-stays"}
    if scheme == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'pdserve[nixl]'")
        url, not_checked = "nixl://", needs_store
    else:
        server = request.getfixturevalue("redis_server")
        url, not_checked = f"redis+unix://{server.socket}", {"leases-under-pressure", "capacity"}
    command = [sys.executable, "-m", "pdserve", "connector", "check", url, "--seconds", "0.5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    rules = json.loads(done.stdout[done.stdout.index("{") :])["rules"]
    assert {one["rule"] for one in rules if one["verdict"] != "holds"} == not_checked


@pytest.fixture
def command() -> Callable[..., Any]:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["connector", *arguments])

    return run


def test_check_prints_a_table(command: Callable[..., Any]) -> None:
    done = command("check", "memory://test-table", "--rule", "missing", "--rule", "between-processes")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert re.search(r"missing\s+holds", lines[2]) and re.search(
        r"between-processes\s+not checked .*of its own", lines[3]
    )
    assert lines[-1] == "1 holds, 0 broken, 1 not checked"


def test_memory_of_a_check_or_a_measurement_does_not_stay(command: Callable[..., Any], tmp_path: Path) -> None:
    name = f"test-{uuid.uuid4().hex}"
    url = f"tiered://shm://{name}?size=1MiB,file://{tmp_path}"
    small = ["--block-bytes", "4KiB", "--blocks", "1", "--concurrency", "1", "--seconds", "0.05"]
    assert command("check", url, "--rule", "missing").exit_code == 0
    assert command("bench", url, *small).exit_code == 0
    assert not shm_segment.paths(name)
    with closing(Trial(f"shm://{name}?size=1MiB", 1.0)) as other:
        other.instance().must_store(new_keys(1), [0])
        there = shm_segment.paths(name)
        assert command("check", url, "--rule", "missing").exit_code == 0
        assert there and shm_segment.paths(name) == there  # somebody's
    shm.unlink(f"shm://{name}")


@pytest.mark.usefixtures("broken_package")
def test_check_as_json_and_its_exit_code(command: Callable[..., Any]) -> None:
    done = command("check", "broken-pastthegap://test-json", "--rule", "leading-match", "--json")
    assert done.exit_code == 1
    said = json.loads(done.stdout)
    assert said["passed"] is False
    (rule,) = said["rules"]
    assert (rule["rule"], rule["verdict"]) == ("leading-match", "broken")
    assert rule["says"].startswith("`match` counts leading keys") and rule["seconds"] >= 0 and "saw 5" in rule["detail"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "memory://x", "--rule", "luck"], "There is no rule 'luck'; the rules are round-trip, "),
        (["check", "nowhere://x"], "There is no connector for nowhere://"),
        (["check", "redis://127.0.0.1:1/0"], "No Redis answers"),
        (["bench", "memory://x", "--blocks", "1,many"], "'many' is not a whole number"),
        (["bench", "memory://x", "--block-bytes", "big"], "block-bytes"),
    ],
)
def test_mistakes_are_a_sentence(command: Callable[..., Any], arguments: list[str], sentence: str) -> None:
    error = command(*arguments).exception  # which `main` turns into one line and exit code 2
    assert isinstance(error, SetupError)
    assert sentence in str(error)


# Under pytest.

USES_FIXTURE = """
pytest_plugins = ["pdserve.kv_transfer.pytest_plugin"]

def test_conformance(connector_rule):
    connector_rule("broken-pastthegap://test-fixture")
"""


def run_pytest(folder: Path, broken: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(broken), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_pytest_with_a_url(tmp_path: Path, broken_package: Path) -> None:
    chosen = "missing or leading or between"
    options = ["-p", "pdserve.kv_transfer.pytest_plugin", "--connector", "broken-pastthegap://x", "-k", chosen]
    done = run_pytest(tmp_path, broken_package, *options)
    assert "1 failed, 1 passed, 1 skipped, 20 deselected" in done.stdout, done.stdout + done.stderr
    assert "leading-match: expected 3 leading keys, the fourth being missing, saw 5" in done.stdout
    assert "Traceback" not in done.stdout and "each process has a store of its own" in done.stdout


def test_pytest_with_the_fixture(tmp_path: Path, broken_package: Path) -> None:
    (tmp_path / "test_mine.py").write_text(USES_FIXTURE)
    done = run_pytest(tmp_path, broken_package, "-k", "missing or leading")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "leading-match: expected 3 leading keys" in done.stdout


# What is installed.

VERSIONS = """
from pdserve.kv_transfer.connectors.memory import MemoryConnector

class Current(MemoryConnector):
    API_VERSION = 1

class Grown(Current):
    pass

class Later(MemoryConnector):
    API_VERSION = 99

class Undeclared(MemoryConnector):
    pass

Nothing = 7
"""


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_connectors: Install) -> Iterator[None]:
    (tmp_path / "source.py").write_text(VERSIONS)
    (tmp_path / "boom.py").write_text("raise RuntimeError('no such luck')")
    (tmp_path / "site").mkdir()
    names = ["Current", "Grown", "Later", "Undeclared", "Nothing", "Lost"]
    install_connectors(
        tmp_path / "site", "versions", tmp_path / "source.py", {f"v-{name.lower()}": name for name in names}
    )
    install_connectors(tmp_path / "site", "boom", tmp_path / "boom.py", {"v-boom": "Boom"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    sys.modules.pop("versions", None)


@pytest.mark.usefixtures("versions")
def test_list_says_what_can_be_used(command: Callable[..., Any]) -> None:
    done = command("list", "--json")
    assert done.exit_code == 0
    rows = {row["scheme"]: row for row in json.loads(done.stdout)}
    assert rows["shm"]["package"] == "pdserve" and rows["shm"]["contract"] == 1 and rows["shm"]["usable"]
    seen = {scheme[2:]: (row["contract"], row["usable"]) for scheme, row in rows.items() if scheme.startswith("v-")}
    assert seen == {
        "current": (1, True),
        "grown": (1, True),
        "later": (99, False),
        "undeclared": (None, True),
        "nothing": (None, False),
        "lost": (None, False),
        "boom": (None, False),
    }
    assert "written for version 99 of the connector contract; this pdserve speaks version 1" in rows["v-later"]["why"]
    assert "does not declare API_VERSION" in rows["v-undeclared"]["why"]
    assert "RuntimeError: no such luck" in rows["v-boom"]["why"]
    assert rows["v-later"]["package"] == "versions" and rows["v-later"]["version"] == "0.1"
    table = command("list").output
    assert re.search(r"v-later://\s+versions\s+0.1\s+99\s+no: .*version 99", table)
    assert re.search(r"v-undeclared://\s+versions\s+0.1\s+unknown\s+yes: ", table)


def test_what_is_no_connector_declares_no_version() -> None:
    assert declared_version(int) is None


def test_a_rule_that_never_ends_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    def endless(_: Any) -> str:
        """Never ends."""
        threading.Event().wait(20)
        return ""

    monkeypatch.setattr(conformance, "RULE_TIMEOUT_S", 0.1)
    report = try_rule(endless, "memory://x", seconds=0.0)
    assert report.verdict is Verdict.BROKEN and "saw none after 0.1 s" in report.detail


# Bench.


def test_bench_measures_and_writes_json(command: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = [
        "--block-bytes",
        "64KiB",
        "--blocks",
        "1,4",
        "--concurrency",
        "2",
        "--seconds",
        "0.05",
        "--json",
        str(file),
    ]
    done = command("bench", "memory://test-bench?size=64MiB", *options)
    assert done.exit_code == 0, done.output
    said = json.loads(file.read_text())
    assert said["block_bytes"] == 65536
    rows = said["figures"]
    assert [(row["operation"], row["blocks"], row["concurrency"]) for row in rows] == [
        (operation, blocks, 2) for blocks in (1, 4) for operation in ("store", "load")
    ]
    for row in rows:
        assert row["failed"] == 0 and row["gib_s"] > 0 and row["memcpy_gib_s"] > 0 and row["p50_ms"] <= row["p99_ms"]
        assert 0 < row["call_p50_ms"] <= row["call_max_ms"]
        assert row["of_memcpy"] == pytest.approx(row["gib_s"] / row["memcpy_gib_s"], rel=0.01)
    assert re.search(r"load\s+4\s+2\s", done.output)


def test_bench_counts_what_did_not_go_well() -> None:
    rows = list(figures("memory://test-full?size=1MiB", 1 << 20, [4], [1], 0.02))
    assert rows[0].operation == "store" and rows[0].failed > 0


def test_bench_as_json_on_the_output_is_json_only(command: Callable[..., Any]) -> None:
    options = ["--block-bytes", "4KiB", "--blocks", "1", "--concurrency", "1", "--seconds", "0.05", "--json", "-"]
    assert json.loads(command("bench", "memory://test-out", *options).stdout)["figures"]


def test_counts_are_parsed() -> None:
    assert parse_counts("1, 16,64", "blocks") == [1, 16, 64]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_a_plot_needs_matplotlib(command: Callable[..., Any], tmp_path: Path) -> None:
    error = command("bench", "memory://x", "--plot", str(tmp_path / "plot.png")).exception
    assert isinstance(error, SetupError) and "pip install matplotlib" in str(error)
