"""Pytest plugin: slow tests are left out only while the files that they depend on are those with which they last passed.

A test marked `until_recorded("kernels/gpu", "pdserve/keys.py")` belongs to `make slow`. `make test` runs it too, as long as
recorded.json beside this file has not its name with the digest of kernels/gpu, tests/kernels/gpu, pdserve/keys.py, and the
versions of all dependencies. When it passes, its name is recorded.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("recorded.json")
MARKER = "until_recorded"
DEPENDENCIES = "constraints.txt"


@cache
def digest(*names: str, root: Path = ROOT) -> str:
    """Return the SHA-256, in hexadecimal, of the names and bytes of files.

    A name is that of a file, or of a folder, which stands for its Python files and those of its tests.
    """
    files = [root / DEPENDENCIES, *(file for name in names for file in _files(root, name))]
    return hashlib.sha256(b"".join(_line(file, root) for file in files)).hexdigest()


def _files(root: Path, name: str) -> list[Path]:
    if (root / name).is_file():
        return [root / name]
    code, tests = (sorted(folder.rglob("*.py")) for folder in (root / name, root / "tests" / name))
    if not code:
        raise pytest.UsageError(f"{MARKER} names {name}, which is no file, and no folder with a Python file, in {root}")
    return code + tests


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
