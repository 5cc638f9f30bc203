"""The environment of conformance rules: what a rule leaves in a store."""

import time
import uuid
from concurrent.futures import Future
from typing import Any

import pytest

from pdserve.kv_transfer.conformance import Verdict, rules_named, try_rule
from pdserve.kv_transfer.connectors import memory
from pdserve.kv_transfer.forwarding import ForwardingConnector
from pdserve.kv_transfer.rules import context
from pdserve.kv_transfer.rules.context import RuleContext, new_keys


def test_a_store_is_not_left_full_where_nothing_can_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector without hooks, whose store has room for the blocks of one rule."""
    url = f"memory://test-{uuid.uuid4().hex}?size=70KiB"
    monkeypatch.setattr(context, "connect", lambda url: ForwardingConnector(memory.MemoryConnector(url)))
    for _ in range(2):
        rules = RuleContext(url, 0.1)
        rules.attach().must_store(new_keys(16), range(16), must_fit=True)
        rules.close()
    memory.unlink(url)


@pytest.mark.parametrize("rule", ["deadline", "resumption", "refused-operations"])
def test_a_store_slower_than_the_timeout_of_a_rule_is_not_broken(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put, url = memory.MemoryConnector.put, f"memory://test-{uuid.uuid4().hex}"

    def put_late(self: memory.MemoryConnector, *value: Any) -> None:
        time.sleep(0.3)
        put(self, *value)

    monkeypatch.setattr(memory.MemoryConnector, "put", put_late)
    monkeypatch.setattr(context, "WAIT_LIMIT_S", 0.1)
    report = try_rule(rules_named([rule])[0], url)
    assert report.verdict is Verdict.NOT_CHECKED and "the timeout of this rule" in report.detail, report.detail
    assert try_rule(rules_named([rule])[0], f"{url}?timeout=5").verdict is Verdict.HOLDS
    memory.unlink(url)


def test_an_interrupt_amid_a_wait_is_no_fault_of_the_connector() -> None:
    """Python then leaves the wait without its lock, and says so in an exception of its own."""

    class Interrupted(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            try:
                raise KeyboardInterrupt
            finally:
                raise RuntimeError("cannot release un-acquired lock")

    rules = RuleContext(f"memory://test-{uuid.uuid4().hex}", 0.1)
    with pytest.raises(KeyboardInterrupt):
        rules.attach().wait(Interrupted(), "store")
    rules.close()
