"""A pytest plugin, for CI: a skipped test that is not listed here has failed, so that none is left out unseen."""

from collections.abc import Generator
from typing import TypeVar

import pytest

# The test's name, or the file's of a module that skips as a whole, and why CI cannot run it.
KNOWN = {
    "test_vllm_bench_serve": "vLLM is 3 GB, in an environment of its own that PDSERVE_VLLM names",
    "test_linear.py": "needs a processor with AMX, which not every machine has",
    "test_amx_without_permission_falls_back": "needs a processor with AMX, which not every machine has",
}

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _judged((yield))


def _judged(report: Report) -> Report:
    name = report.nodeid.rpartition("/")[2].rpartition("::")[2].partition("[")[0]
    if report.skipped and not hasattr(report, "wasxfail") and name not in KNOWN:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = (
            f"{reason}\nCI runs all tests but those in tests/skips.py: install what this one needs, or list it."
        )
    return report
