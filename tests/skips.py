"""Pytest plugin for CI: a skipped test that is not listed here fails, so that no skip goes unnoticed."""

from collections.abc import Generator
from typing import TypeVar

import pytest

# Name of a test, or of the file of a module that skips as a whole → reason why CI cannot run it.
ALLOWED = {
    "test_vllm_bench_serve": "vLLM is 3 GB and needs a separate environment, named by PDSERVE_VLLM",
    "test_amx": "needs a CPU with AVX-512 and bfloat16, which not every machine has",
    "test_rows": "needs a CPU with AVX-512 and bfloat16, which not every machine has",
    "test_vector_widths": "is about instruction sets of x86-64",
    "test_gated_layers_equal_their_parts": "needs a CPU with AMX, which not every machine has",
    "test_amx_without_permission_falls_back": "needs a CPU with AMX, which not every machine has",
}

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _fail_unlisted_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _fail_unlisted_skip((yield))


def _fail_unlisted_skip(report: Report) -> Report:
    name = report.nodeid.rpartition("/")[2].rpartition("::")[2].partition("[")[0]
    if report.skipped and not hasattr(report, "wasxfail") and name not in ALLOWED:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        rule = "CI runs all tests except those in tests/skips.py: install the missing dependency, or list the test."
        report.longrepr = f"{reason}\n{rule}"
    return report
