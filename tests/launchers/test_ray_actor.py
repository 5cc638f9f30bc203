"""The process of a Ray actor, without Ray's cluster; tests/integration/test_ray.py has one."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from pdserve.launchers.ray_actor import InstanceActor


def test_output_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as the message of a library in another encoding: the actor, and with it the instance, would end."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nprintf 'a\\351b\\nmore\\n'\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    printed = [*InstanceActor("decode-0").run([], {})]
    assert printed == [os.getpid(), "a\N{REPLACEMENT CHARACTER}b\n", "more\n", 7]
