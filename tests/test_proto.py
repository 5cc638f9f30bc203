"""The committed stubs equal the output of scripts/proto for proto/pdserve.proto."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STUBS = ("pdserve_pb2.py", "pdserve_pb2.pyi")


@pytest.mark.skipif(not (ROOT / ".venv").is_dir(), reason="scripts/proto uses .venv, which `make setup` creates")
def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts" / "proto", tmp_path], check=True, timeout=1200)
    generated = tmp_path / "pdserve" / "proto"
    assert sorted(path.name for path in generated.iterdir()) == sorted(STUBS)
    for name in STUBS:
        assert (generated / name).read_text() == (ROOT / "proto" / name).read_text(), (
            f"{name} is outdated: run `make proto`"
        )
