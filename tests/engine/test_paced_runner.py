"""Paced instances refuse profiles that are not theirs, in a sentence."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.config import EngineConfig
from pdserve.engine.paced_runner import PacedRunner
from pdserve.errors import SetupError
from pdserve.profile.profile import EngineFacts, Profile

PROFILE = Profile(model="demo", engine=EngineFacts(block_bytes=64, num_blocks=8, max_model_len=64))


def load(profile: Profile, folder: Path, *, force: bool = False) -> PacedRunner:
    profile.save(folder / "p.json")
    return PacedRunner.load(EngineConfig(model="demo", paced=str(folder / "p.json"), force=force))


def test_a_profile_of_another_model_is_refused_unless_forced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(PROFILE, tmp_path).kv.num_blocks == 8
    other, reason = replace(PROFILE, model="llama"), "p.json is a profile of llama, and this instance serves demo"
    with pytest.raises(SetupError, match=f"{reason}; --force uses it nevertheless"):
        load(other, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load(other, tmp_path, force=True).kv.num_blocks == 8
    assert reason in caplog.text


def test_a_profile_without_blocks_or_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="says 0 blocks; give --num-blocks"):
        load(replace(PROFILE, engine=EngineFacts(block_bytes=64)), tmp_path)
    with pytest.raises(SetupError, match=r"--paced .*none.json cannot be read: No such file"):
        PacedRunner.load(EngineConfig(paced=str(tmp_path / "none.json")))
