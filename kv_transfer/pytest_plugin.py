"""Pytest plugin that runs the conformance kit.

    pytest -p pdserve.kv_transfer.pytest_plugin --connector mystore://host:port

adds one test per rule to the collected tests. In a test file, the fixture `connector_rule` does the same for a store that the
tests start themselves:

    pytest_plugins = ["pdserve.kv_transfer.pytest_plugin"]  # in conftest.py

    def test_conformance(connector_rule, my_server):
        connector_rule(my_server.url)

A rule that cannot be checked is a skipped test, with the reason. If the store cannot be used at all, all tests fail.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from pdserve.errors import SetupError
from pdserve.kv_transfer.conformance import RULES, Report, Rule, Verdict, name_of, require_usable, try_rule


class RuleBroken(Exception):
    """Fails a test with a sentence and no traceback, since the error is not in the kit."""


class RuleItem(pytest.Item):
    """A test of one rule with one connector URL."""

    def __init__(self, *, rule: Rule, url: str, seconds: float, **rest: Any) -> None:
        super().__init__(**rest)
        self._rule = rule
        self._url = url
        self._seconds = seconds

    def runtest(self) -> None:
        _try(self._rule, self._url, self._seconds)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, RuleBroken):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        return "conformance", None, self.name


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pdserve")
    group.addoption(
        "--connector", action="append", default=[], metavar="URL", help="check this connector's conformance"
    )
    group.addoption("--connector-seconds", type=float, default=2.0, help="how long randomized rules run")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds: float = config.getoption("--connector-seconds")
    for url in config.getoption("--connector"):
        for rule in RULES:
            name = f"{name_of(rule)}[{url}]"
            items.append(RuleItem.from_parent(session, name=name, rule=rule, url=url, seconds=seconds))


@pytest.fixture(params=RULES, ids=name_of)
def connector_rule(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A function of a connector URL that fails the test if the rule does not hold. One test per rule."""
    seconds: float = request.config.getoption("--connector-seconds")

    def check(url: str) -> None:
        __tracebackhide__ = True
        _try(request.param, url, seconds)

    return check


_require_usable = cache(
    require_usable
)  # once per URL; otherwise a store that cannot be used would be skipped tests only


def _try(rule: Rule, url: str, seconds: float) -> None:
    __tracebackhide__ = True
    try:
        _require_usable(url)
    except SetupError as error:
        raise RuleBroken(str(error)) from None
    _raise_unless_holds(try_rule(rule, url, seconds))


def _raise_unless_holds(report: Report) -> None:
    __tracebackhide__ = True
    if report.verdict is Verdict.NOT_CHECKED:
        pytest.skip(report.detail)
    if report.verdict is Verdict.BROKEN:
        raise RuleBroken(f"{report.rule}: {report.detail}\n{report.says}\n{report.source}")
