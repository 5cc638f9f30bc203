"""Pytest plugin: slow tests of a folder are left out only while its files are those with which the tests last passed.

A test marked `until_recorded("kernels/gpu")` belongs to `make slow`. `make test` runs it too, as long as recorded.json beside
this file has not its name with the digest of kernels/gpu and tests/kernels/gpu. When it passes, its name is recorded.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("recorded.json")
MARKER = "until_recorded"


@cache
def digest(folder: str, root: Path = ROOT) -> str:
    """Return the SHA-256 of the names and bytes of a folder's Python files and of its tests, in hexadecimal."""
    files = [file for part in (root / folder, root / "tests" / folder) for file in sorted(part.rglob("*.py"))]
    if not any(file.is_relative_to(root / folder) for file in files):
        raise pytest.UsageError(f"{MARKER} names the folder {folder}, which has no Python file in {root}")
    return hashlib.sha256(b"".join(_line(file, root) for file in files)).hexdigest()


def _line(file: Path, root: Path) -> bytes:
    return f"{file.relative_to(root).as_posix()} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()


class Recorded:
    """The record, and what has passed since it was read. `has_gpu`: tests are always due, and prove nothing without one."""

    def __init__(self, has_gpu: bool, file: Path = RECORD, root: Path = ROOT) -> None:
        self._file, self._root, self._has_gpu = file, root, has_gpu
        self._known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
        self._passed: dict[str, str] = {}

    def is_due(self, item: pytest.Item) -> bool:
        """Return whether a slow test must run although slow tests are left out."""
        marker = item.get_closest_marker(MARKER)
        if marker is None:
            return False
        return self._has_gpu or self._known.get(item.nodeid) != digest(*marker.args, root=self._root)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if marker := item.get_closest_marker(MARKER):
            item.user_properties.append((MARKER, digest(*marker.args, root=self._root)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and not self._has_gpu:
            self._passed |= dict(
                (report.nodeid, str(value)) for name, value in report.user_properties if name == MARKER
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        known = self._known | self._passed
        if known != self._known and not hasattr(session.config, "workerinput"):  # xdist's workers report to one process
            self._file.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
