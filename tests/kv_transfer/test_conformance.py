"""Tests of the conformance kit: correct connectors pass, and each broken one is caught by the expected rule."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import SetupError
from pdserve.kv_transfer import check_command, conformance
from pdserve.kv_transfer.conformance import (
    RULES,
    Report,
    Verdict,
    check,
    declared_version,
    name_of,
    rules_named,
    try_rule,
)
from pdserve.kv_transfer.connectors import memory
from pdserve.kv_transfer.connectors.file import FileConnector
from pdserve.kv_transfer.connectors.shm import connector as shm
from pdserve.kv_transfer.connectors.shm import segment
from pdserve.kv_transfer.rules import behaviour, context
from pdserve.kv_transfer.rules.context import RuleContext, new_keys

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent

Install = Callable[[Path, str, Path, dict[str, str]], None]

NAMES = "", "_clients", "_habits", "_stores", "_uses"  # loaded by conftest.py
broken, clients, habits, stores, uses = (importlib.import_module(f"pdserve_broken{name}") for name in NAMES)
BROKEN: list[tuple[type, str, str]] = broken.BROKEN + clients.BROKEN + habits.BROKEN + stores.BROKEN + uses.BROKEN
SLOW_TO_DETECT = *broken.SLOW_TO_DETECT, *habits.SLOW_TO_DETECT, *stores.SLOW_TO_DETECT, *uses.SLOW_TO_DETECT
# What the checks of correct connectors depend on, see tests/test_layers.py.
OURS = ("kv_transfer", "pdserve/errors.py", "pdserve/keys.py", "pdserve/sizes.py", "tests/redis_servers.py")
until_recorded = pytest.mark.until_recorded(*OURS)


@pytest.fixture
def segment_size() -> str:
    return "270MiB"  # large enough for blocks of 8 MiB, and below the size up to which the kit fills a store


def test_each_rule_has_a_broken_connector() -> None:
    assert {rule for _, rule, _ in BROKEN} == {name_of(rule) for rule in RULES}


Try = Callable[[type, str], Report]


@pytest.fixture
def try_variant(broken_package: Path, wire_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """Checks a rule with a variant in a store of its own."""

    def try_one(connector: type, rule: str) -> Report:
        scheme, name = f"broken-{connector.__name__.lower()}", f"test-{uuid.uuid4().hex}"
        timeout = 0.3 if rule == "deadline" else 3 if connector is broken.NeverCompletes else 60
        if issubclass(connector, clients.WireConnector):
            name, parameters = wire_address, "?timeout=0.5" if connector in (habits.OneClient, habits.RareDelay) else ""
        elif issubclass(connector, FileConnector):
            name, parameters = f"/{tmp_path}/{name}", f"?timeout={timeout}"
        else:
            parameters = f"?size=48MiB&timeout={timeout}"
        report = try_rule(rules_named([rule])[0], f"{scheme}://{name}{parameters}", seconds=0.5)
        memory.unlink(f"{scheme}://{name}")
        return report

    return try_one


@pytest.mark.parametrize(("connector", "rule", "detail"), BROKEN, ids=[f"{c.__name__}-{rule}" for c, rule, _ in BROKEN])
def test_broken_connectors_are_caught(
    connector: type, rule: str, detail: str, try_variant: Try, monkeypatch: pytest.MonkeyPatch
) -> None:
    if connector in (*SLOW_TO_DETECT, *(row[0] for row in clients.BROKEN)):
        monkeypatch.setattr(context, "GRACE_S", 0.3 if connector is broken.NeverCompletes else 3.0)
        for module in (context, behaviour):
            monkeypatch.setattr(module, "WAIT_LIMIT_S", 1.0)
    report = try_variant(connector, rule)
    assert report.verdict is Verdict.BROKEN, report.detail
    assert detail in report.detail, report.detail


@pytest.mark.slow
@pytest.mark.parametrize("needed", [name_of(rule) for rule in RULES])
def test_without_a_rule_a_broken_connector_would_pass(needed: str, try_variant: Try) -> None:
    caught = {}
    for connector in [row[0] for row in BROKEN if row[1] == needed]:
        others = (name_of(rule) for rule in RULES if name_of(rule) not in broken.seen_by(needed))
        reports = (try_variant(connector, rule) for rule in others)
        caught[connector] = next((one for one in reports if one.verdict is Verdict.BROKEN), None)
        if caught[connector] is None:
            return
    raise AssertionError(f"other rules catch each variant: {caught}")


@until_recorded
def test_a_connector_over_tcp_passes(broken_package: Path, wire_address: str) -> None:
    reports = {one.rule: one for one in check(f"wire://{wire_address}", seconds=0.5)}
    assert not {rule: one.detail for rule, one in reports.items() if one.verdict is not Verdict.HOLDS}


@pytest.mark.parametrize(
    "scheme",
    ["memory", *(pytest.param(one, marks=until_recorded) for one in ("shm", "file", "redis", "redis+cluster"))],
    indirect=True,
)
def test_correct_connectors_pass(url: str, scheme: str) -> None:
    reports = {one.rule: one for one in check(url, seconds=0.5)}
    assert not [one for one in reports.values() if one.verdict is Verdict.BROKEN]
    not_checked = {one.rule for one in reports.values() if one.verdict is Verdict.NOT_CHECKED}
    unlimited, unshared = {name_of(rule) for rule in FULL_STORE_RULES}, {"between-processes", "killed-writer"}
    no_relay = {name_of(rule) for rule in RELAY_RULES}
    expected = {"memory": unlimited | unshared | no_relay, "shm": no_relay, "file": unlimited | no_relay}
    expected |= {"redis": unlimited, "redis+cluster": unlimited | no_relay}
    assert not_checked == expected[scheme]
    assert (reports["deadline"].detail.startswith("held up and cut by a relay")) == (scheme == "redis")
    assert not any(one.detail.startswith("blocks of") for one in reports.values())  # all block sizes were tried


@pytest.mark.slow
def test_valkey_passes(redis_servers: Any, tmp_path: Path) -> None:
    with closing(redis_servers.RedisServer(tmp_path, program=redis_servers.VALKEY)) as server:
        reports = {one.rule: one for one in check(f"redis+unix://{server.socket}", seconds=0.3)}
    exceptions = {rule: one.detail for rule, one in reports.items() if one.verdict is not Verdict.HOLDS}
    assert set(exceptions) == {name_of(rule) for rule in (*FULL_STORE_RULES, *RELAY_RULES)}, exceptions


def test_a_relay_that_blocks_bypass_is_detected(redis_cluster: Any) -> None:
    """A cluster node redirects clients to the real addresses of all nodes, which bypass the relay."""
    url = f"redis+cluster://127.0.0.1:{redis_cluster.nodes[0].port}"
    report = try_rule(rules_named(["deadline"])[0], url, seconds=0.5)
    assert report.verdict is Verdict.HOLDS and report.detail.startswith("held up in its hooks")


@pytest.mark.slow
def test_tiers_of_memory_and_files_pass(tmp_path: Path) -> None:
    name = f"shm://test-{uuid.uuid4().hex}"
    url = f"tiered://{name}?size=64MiB,file://{tmp_path}/kv"
    try:  # without the rules for full stores, since files have no limit
        reports = [try_rule(rule, url, seconds=0.5) for rule in RULES if rule not in (*FULL_STORE_RULES, *RELAY_RULES)]
    finally:
        shm.unlink(name)
    assert not {one.rule: one.detail for one in reports if one.verdict is not Verdict.HOLDS}


@pytest.mark.parametrize(
    ("policy", "rule", "verdicts"),
    [
        ("noeviction", "leases-under-pressure", {Verdict.HOLDS}),
        ("allkeys-lru", "leases-under-pressure", {Verdict.NOT_CHECKED}),
        # Whether the first block is lost from both tiers depends on how many reached Redis before memory evicted them.
        ("allkeys-lru", "capacity", {Verdict.HOLDS, Verdict.NOT_CHECKED}),
        ("allkeys-lru", "killed-writer", {Verdict.HOLDS}),
    ],
)
def test_full_tiers(start_redis: Callable[..., Any], policy: str, rule: str, verdicts: set[Verdict]) -> None:
    server = start_redis("--maxmemory", "60mb", "--maxmemory-policy", policy)
    name = f"shm://test-{uuid.uuid4().hex}"
    try:
        report = try_rule(rules_named([rule])[0], f"tiered://{name}?size=40MiB,{server.url}", seconds=0.5)
    finally:
        shm.unlink(name)
    assert report.verdict in verdicts, report.detail


FULL_STORE_RULES = rules_named(["prolonged-lease", "leases-under-pressure", "capacity"])
RELAY_RULES = rules_named(["attaching", "stalled-value", "silent-connections", "byte-by-byte"])


def test_full_memory() -> None:
    url = f"memory://test-{uuid.uuid4().hex}?size=20MiB"
    assert [try_rule(rule, url).verdict for rule in FULL_STORE_RULES] == [Verdict.HOLDS] * 3


def test_full_redis(start_redis: Callable[..., Any]) -> None:
    server = start_redis("--maxmemory", "40mb", "--maxmemory-policy", "noeviction")
    assert [try_rule(rule, server.url).verdict for rule in FULL_STORE_RULES] == [Verdict.HOLDS] * 3


def test_redis_that_evicts_leased_blocks(start_redis: Callable[..., Any]) -> None:
    server = start_redis("--maxmemory", "40mb", "--maxmemory-policy", "allkeys-lru")
    leases, capacity = (try_rule(rule, server.url) for rule in FULL_STORE_RULES[1:])
    assert leases.verdict is Verdict.NOT_CHECKED and "evicts leased blocks too" in leases.detail
    assert capacity.verdict is Verdict.HOLDS


# Connectors without hooks: rules that the kit cannot check are not reported as holding.

PLAIN = """
from concurrent.futures import Future, wait
from dataclasses import replace

from pdserve.kv_transfer.connector import Connector, Outcome
from pdserve.kv_transfer.connectors.memory import MemoryConnector
from pdserve.kv_transfer.connectors.redis.connector import RedisConnector
from pdserve.kv_transfer.connectors.shm.connector import ShmConnector

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
        self._inner.timeout = 0.3  # after the first store, which must succeed
        return future

class Tickets:
    def match(self, keys):
        future = Future()
        future.set_result(0)
        return future

    def open(self):
        super().open()
        self._finish_transfer = self.finish_with_ticket

    def finish_with_ticket(self, operation):
        result = type(self)._finish_transfer(self, operation)
        return replace(result, ticket=b"here" if operation.kind == "store" else b"")

class Ticketed(Tickets, MemoryConnector): ...

class TicketedShm(Tickets, ShmConnector): ...

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
    names |= {"ticketed-shm": "TicketedShm", "pretends": "Pretends"}
    names |= {"plain-redis": "PlainRedis", "givesup-redis": "GivesUp"}
    install_connectors(tmp_path / "site", "plain_connectors", tmp_path / "source.py", names)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "plain_connectors", raising=False)


@pytest.mark.usefixtures("plain_package")
def test_rules_that_need_access_to_stored_bytes_are_not_checked() -> None:
    flipped, foreign, deadline, missing = rules_named(["flipped-bytes", "foreign-namespace", "deadline", "missing"])
    url = f"plain://test-{uuid.uuid4().hex}"
    assert try_rule(missing, url).verdict is Verdict.HOLDS
    assert try_rule(flipped, url).verdict is Verdict.NOT_CHECKED
    assert try_rule(deadline, url).verdict is Verdict.NOT_CHECKED
    report = try_rule(foreign, url)  # the checkable part holds, and the rest is noted
    assert (
        report.verdict is Verdict.HOLDS and "headers not checked: the connector has no method tamper" in report.detail
    )
    reachable = [try_rule(rule, url.replace("plain", "reachable")) for rule in (flipped, foreign)]
    assert [(one.verdict, one.detail[:7]) for one in reachable] == [(Verdict.HOLDS, "values "), (Verdict.HOLDS, "")]
    headless = [try_rule(rule, url.replace("plain", "headless")) for rule in (flipped, foreign)]
    assert [one.verdict for one in headless] == [Verdict.HOLDS] * 2
    assert "nothing to tamper with at offset" in headless[1].detail


@pytest.mark.usefixtures("plain_package")
def test_caller_never_waits_without_hooks(start_redis: Callable[..., Any]) -> None:
    """The kit can only hold up the connection, and cannot set a timeout."""
    (rule,) = rules_named(["caller-never-waits"])
    assert try_rule(rule, f"plain://test-{uuid.uuid4().hex}").verdict is Verdict.NOT_CHECKED
    server = start_redis()
    sound = try_rule(rule, f"plain-{server.url}")
    assert (sound.verdict, sound.detail) == (Verdict.HOLDS, "held up and cut by a relay")
    gives_up = try_rule(rule, f"givesup-{server.url}")
    assert gives_up.verdict is Verdict.BROKEN and "before they give up on a store that hangs" in gives_up.detail


@pytest.mark.usefixtures("plain_package")
def test_connectors_with_tickets() -> None:
    need_store = ["leading-match", "lease", "longer-lease", "leases-under-pressure", "capacity", "many-threads"]
    need_no_store = ["results", "missing", "foreign-namespace", "release", "cancelled", "counts", "clean-close"]
    url = f"ticketed://test-{uuid.uuid4().hex}"
    for rule in rules_named(need_store):
        report = try_rule(rule, url)
        assert report.verdict is Verdict.NOT_CHECKED and "carry tickets" in report.detail, report
    assert [try_rule(rule, url).verdict for rule in rules_named(need_no_store)] == [Verdict.HOLDS] * len(need_no_store)


@until_recorded
@pytest.mark.usefixtures("plain_package")
def test_process_rules_with_tickets() -> None:
    rules, name = rules_named(["between-processes", "killed-writer"]), f"test-{uuid.uuid4().hex}"
    alone = [try_rule(rule, f"ticketed://{name}") for rule in rules]
    assert [one.verdict for one in alone] == [Verdict.NOT_CHECKED] * 2 and "carry tickets" in alone[0].detail
    sound = [try_rule(rule, f"ticketed-shm://{name}?size=64MiB", seconds=1.0) for rule in rules]
    assert [one.verdict for one in sound] == [Verdict.HOLDS] * 2, [one.detail for one in sound]
    assert "processes killed while their blocks were read" in sound[1].detail
    lies = [try_rule(rule, f"pretends://{name}?size=64MiB", seconds=0.2) for rule in rules]
    assert [one.verdict for one in lies] == [Verdict.BROKEN] * 2 and "wrong bytes in a block" in lies[0].detail
    shm.unlink(f"shm://{name}")


# The guide.


@pytest.fixture
def guide_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_connectors: Install
) -> str:
    """URL of a store for the example of this scheme in the guide, which is installed."""
    scheme = request.param
    guide = (ROOT / "docs" / "connectors.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S)
    (code,) = (block for block in blocks if f'scheme: ClassVar[str] = "{scheme}"' in block)
    (tmp_path / "source.py").write_text(code)
    (tmp_path / "site").mkdir()
    names = {scheme: f"{scheme.capitalize()}Connector"}
    install_connectors(tmp_path / "site", f"{scheme}_connector", tmp_path / "source.py", names)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    if scheme == "sqlite":
        return f"sqlite://{tmp_path}/kv.db?size=80MiB"
    return f"memcached://{request.getfixturevalue('memcached_address')}"


GUIDE_EXCEPTIONS = {
    "sqlite": {"attaching", "stalled-value", "silent-connections", "byte-by-byte", "prolonged-lease"},
    "memcached": set[str](),
}
BOTH = pytest.mark.parametrize(
    ("guide_url", "scheme"), [(one, one) for one in GUIDE_EXCEPTIONS], indirect=["guide_url"]
)


@pytest.mark.until_recorded(*OURS, "docs/connectors.md")
@BOTH
def test_the_connectors_of_the_guide_pass(guide_url: str, scheme: str) -> None:
    reports = list(check(guide_url, seconds=0.3))
    assert not [one for one in reports if one.verdict is Verdict.BROKEN]
    exceptions = {one.rule: one.detail for one in reports if one.verdict is not Verdict.HOLDS}
    evicted = {rule for rule, detail in exceptions.items() if detail.startswith(context.EVICTS_LEASED)}
    assert set(exceptions) - evicted == GUIDE_EXCEPTIONS[scheme], exceptions
    assert len(evicted) <= 3, exceptions  # memcached drops blocks as it moves memory between sizes


@pytest.mark.slow
@BOTH
def test_a_second_check_of_the_same_store_passes(guide_url: str, scheme: str) -> None:
    for _ in range(2):
        assert not [(one.rule, one.detail) for one in check(guide_url, seconds=0.3) if one.verdict is Verdict.BROKEN]


@pytest.mark.slow
def test_a_second_check_of_the_same_redis_passes(redis_server: Any) -> None:
    for _ in range(2):
        reports = list(check(redis_server.url, seconds=0.3))
        assert not [(one.rule, one.detail) for one in reports if one.verdict is Verdict.BROKEN]


def test_every_rule_says_what_it_tries() -> None:
    assert len(RULES) > 30 and not [name_of(rule) for rule in RULES if not (rule.__doc__ or "").strip()]


def test_a_store_without_space_is_refused(command: Callable[..., Any]) -> None:
    error = command("check", "memory://test-none?size=1KiB").exception
    assert isinstance(error, SetupError) and "is full already" in str(error)


def test_a_rule_that_needs_more_space_is_not_checked() -> None:
    (rule,) = rules_named(["many-threads"])
    report = try_rule(rule, f"memory://test-{uuid.uuid4().hex}?size=100KiB")
    assert report.verdict is Verdict.NOT_CHECKED and "no space for 4 more blocks of 32 KiB" in report.detail


# The command line.


@pytest.mark.parametrize(
    "scheme", [pytest.param("redis+unix", marks=pytest.mark.slow), pytest.param("nixl", marks=until_recorded)]
)
def test_the_command_passes_redis_unix_and_nixl(scheme: str, request: pytest.FixtureRequest) -> None:
    needs_store = {"leading-match", "stored-again", "lease", "longer-lease", "many-threads", "random-loads"}
    full_store = {name_of(rule) for rule in FULL_STORE_RULES}
    needs_store |= full_store | {"deleted-blocks"}
    no_relay = {name_of(rule) for rule in RELAY_RULES}
    if scheme == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed: pip install -e '.[nixl]'")
        url, not_checked = "nixl://", needs_store | {"content-stays", "large-pools"} | no_relay
    else:
        server = request.getfixturevalue("redis_server")
        url, not_checked = f"redis+unix://{server.socket}", full_store | no_relay
    command = [sys.executable, "-m", "pdserve", "connector", "check", url, "--seconds", "0.5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    rules = json.loads(done.stdout[done.stdout.index("{") :])["rules"]
    assert {one["rule"] for one in rules if one["verdict"] != "holds"} == not_checked


def test_check_prints_a_table_and_progress(command: Callable[..., Any]) -> None:
    done = command("check", "memory://test-table", "--rule", "missing", "--rule", "between-processes")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert re.search(r"missing\s+holds", lines[2])
    assert re.search(r"between-processes\s+not checked .*of its own, .*\(kv_transfer/rules/processes\.py:\d+", lines[3])
    assert lines[-1] == "1 holds, 0 broken, 1 not checked"
    assert done.stderr.splitlines() == ["1/2 missing", "2/2 between-processes"]


def test_a_report_is_printed_before_the_next_rule_starts(capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []

    def first(_: Any) -> str:
        """The first rule."""
        return ""

    def second(_: Any) -> str:
        """The second rule."""
        printed.append(capsys.readouterr().out)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_command, "rules_named", lambda names: (first, second))
        assert check_command.run("memory://test-order", [], 0.1, as_json=False) == 0
    assert re.search(r"first\s+holds", printed[0])


def test_a_check_of_little_is_no_success(command: Callable[..., Any]) -> None:
    done = command("check", "memory://test-little", "--rule", "between-processes")
    assert done.exit_code == 3
    assert done.stdout.splitlines()[-1] == "This says little: 1 of 1 rules were not checked."
    done = command("check", "memory://test-little", "--rule", "between-processes", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 3 and (report["passed"], report["checked"], report["of"]) == (False, 0, 1)


def test_check_and_bench_remove_the_segments_they_created(command: Callable[..., Any], tmp_path: Path) -> None:
    name = f"test-{uuid.uuid4().hex}"
    url = f"tiered://shm://{name}?size=1MiB,file://{tmp_path}"
    small = ["--block-bytes", "4KiB", "--blocks", "1", "--concurrency", "1", "--seconds", "0.05"]
    assert command("check", url, "--rule", "missing").exit_code == 0
    assert command("bench", url, *small).exit_code == 0
    assert not segment.paths(name)
    with closing(RuleContext(f"shm://{name}?size=1MiB", 1.0)) as other:
        other.attach().must_store(new_keys(1), [0])
        there = segment.paths(name)
        assert command("check", url, "--rule", "missing").exit_code == 0
        assert there and segment.paths(name) == there  # in use by another pool
    shm.unlink(f"shm://{name}")


@pytest.mark.usefixtures("broken_package")
def test_check_as_json_and_its_exit_code(command: Callable[..., Any]) -> None:
    done = command("check", "broken-countspastgap://test-json", "--rule", "leading-match", "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["passed"] is False
    (rule,) = report["rules"]
    assert (rule["rule"], rule["verdict"]) == ("leading-match", "broken")
    assert re.search(r"kv_transfer/rules/blocks\.py:\d+$", rule["source"])
    assert rule["says"].startswith("`match` counts leading keys") and rule["seconds"] >= 0 and "saw 5" in rule["detail"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "memory://x", "--rule", "luck"], "There is no rule 'luck'; the rules are round-trip, "),
        (["check", "nowhere://x"], "There is no connector for nowhere://"),
        (["check", "redis://127.0.0.1:1/0"], "No Redis answers"),
        (["bench", "memory://x", "--blocks", "1,many"], "'many' is not an integer"),
        (["bench", "memory://x", "--block-bytes", "big"], "block-bytes"),
    ],
)
def test_invalid_arguments_are_errors(command: Callable[..., Any], arguments: list[str], sentence: str) -> None:
    error = command(*arguments).exception  # which `main` turns into one line and exit code 2
    assert isinstance(error, SetupError)
    assert sentence in str(error)


# The list of installed connectors.

VERSIONS = """
from pdserve.kv_transfer.connectors.memory import MemoryConnector

class Current(MemoryConnector):
    API_VERSION = 2

class First(MemoryConnector):
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
    names = ["Current", "First", "Grown", "Later", "Undeclared", "Nothing", "Lost"]
    install_connectors(
        tmp_path / "site", "versions", tmp_path / "source.py", {f"v-{name.lower()}": name for name in names}
    )
    install_connectors(tmp_path / "site", "boom", tmp_path / "boom.py", {"v-boom": "Boom"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    sys.modules.pop("versions", None)


@pytest.mark.usefixtures("versions")
def test_list_reports_contract_version_and_usability(command: Callable[..., Any]) -> None:
    done = command("list", "--json")
    assert done.exit_code == 0
    rows = {row["scheme"]: row for row in json.loads(done.stdout)}
    assert rows["shm"]["package"] == "pdserve" and rows["shm"]["contract"] == 2 and rows["shm"]["usable"]
    seen = {scheme[2:]: (row["contract"], row["usable"]) for scheme, row in rows.items() if scheme.startswith("v-")}
    assert seen == {
        "current": (2, True),
        "first": (1, True),
        "grown": (2, True),
        "later": (99, False),
        "undeclared": (None, True),
        "nothing": (None, False),
        "lost": (None, False),
        "boom": (None, False),
    }
    assert "written for version 99 of the connector contract; this pdserve supports version 2" in rows["v-later"]["why"]
    assert rows["v-first"]["why"] == "It is adapted to version 2."
    assert "does not declare API_VERSION" in rows["v-undeclared"]["why"]
    assert "RuntimeError: no such luck" in rows["v-boom"]["why"]
    assert rows["v-later"]["package"] == "versions" and rows["v-later"]["version"] == "0.1"
    table = command("list").output
    assert re.search(r"v-later://\s+versions\s+0.1\s+99\s+no: .*version 99", table)
    assert re.search(r"v-undeclared://\s+versions\s+0.1\s+unknown\s+yes: ", table)


def test_a_class_that_is_no_connector_has_no_declared_version() -> None:
    assert declared_version(int) is None


def test_a_rule_that_does_not_end_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    attached, join = threading.Event(), threading.Thread.join

    def never_end(context: RuleContext) -> str:
        context.attach()
        attached.set()
        return str(threading.Event().wait(20))

    monkeypatch.setattr(threading.Thread, "join", lambda self, limit: join(self, limit * attached.wait(60)))
    monkeypatch.setattr(conformance, "RULE_TIMEOUT_S", 0.1)
    report = try_rule(never_end, "memory://x", seconds=0.0)
    assert report.verdict is Verdict.BROKEN and report.detail.endswith("none after 0.1 s; the last call was attach")
