"""`pdserve profile` on the bundled model."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.errors import SetupError
from pdserve.profile.profile import Machine, Profile
from pdserve.tools.profiling.command import _compare, _progress

COMMAND = [sys.executable, "-m", "pdserve", "profile"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.integration
def test_a_quick_profile_of_the_demo_model(pdserve: Run, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    arguments = ["--quick", "--repeat", "1", "--threads", "1", "--max-model-len", "256", "--max-num-seqs", "16"]
    arguments += ["--speculate", "draft", "--speculative-model", "demo"]
    result = pdserve("profile", *arguments, "--output", str(file))
    assert result.returncode == 0, result.stderr
    assert "mixed, not fitted" in result.stdout and f"written to {file}" in result.stdout.replace("\n", "")
    profile = Profile.load(file)
    assert profile.machine.threads == 1 and profile.machine.device == "cpu" and profile.model_fingerprint
    assert profile.engine.max_model_len == 256 and profile.engine.block_bytes == 32768
    assert profile.step.seconds([(200, 0)]) > profile.step.seconds([(16, 0)]) > 0
    assert profile.step.decode_seconds(16, 1600) > 0 and profile.transfers["shm"].bytes_per_s > 0
    assert set(profile.assumed) <= {"start_up_s", "role_flip_s", "swap"} and profile.machine.cores >= 1
    assert 1 <= profile.machine.contention < 8
    assert profile.overheads.router_request_s + profile.overheads.router_token_s > 0
    assert profile.overheads.engine_step_s > 0 and profile.flags == {"max-model-len": 256}
    assert profile.draft is not None and profile.draft.model == "demo" and profile.draft.step.decode_seconds(16, 0) > 0
    assert profile.overheads.engine_step_s < profile.draft.step.decode_seconds(1, 0), "drafts are none of it"
    assert "ms with 32 rows: a step of demo" in result.stdout


@pytest.mark.slow
@pytest.mark.integration
def test_ctrl_c_ends_it_with_a_sentence(tmp_path: Path) -> None:
    arguments = [*COMMAND, "--output", str(tmp_path / "profile.json"), "--repeat", "1000"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "steps: round" not in (line := process.stderr.readline()):
            assert line or process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert (
        process.returncode == 2 and "pdserve: stopped; no profile was written" in errors and "Traceback" not in errors
    )
    assert not (tmp_path / "profile.json").exists()


def test_a_lost_ctrl_c_ends_the_next_step() -> None:
    before, shown = signal.getsignal(signal.SIGINT), list[str]()
    with pytest.raises(KeyboardInterrupt), _progress() as show:
        show("a step")
        with suppress(KeyboardInterrupt):  # as if it came in a destructor
            signal.raise_signal(signal.SIGINT)
        shown.append("a step")
        show("the next one")
        shown.append("the next one")
    assert shown == ["a step"] and signal.getsignal(signal.SIGINT) is before


def test_a_file_that_cannot_be_read_is_one_line(pdserve: Run, tmp_path: Path) -> None:
    arguments = ["--import-source", "distserve", "--import-file", str(tmp_path / "none.json")]
    result = pdserve("profile", *arguments)
    assert result.returncode == 2
    assert result.stderr == f"pdserve: {tmp_path / 'none.json'} cannot be read: No such file or directory\n"


def test_a_comparison_needs_a_fleet(pdserve: Run) -> None:
    result = pdserve("profile", "--compare", "x.json")
    expected = "pdserve: --compare has no effect without --from-fleet: add that, or leave it out\n"
    assert result.returncode == 2 and result.stderr == expected


def test_a_profile_of_another_machine_is_compared_only_if_forced(capsys: pytest.CaptureFixture[str]) -> None:
    profile = Profile(model="demo", machine=Machine(device="cpu"))
    live = replace(profile, machine=Machine(device="cuda"))
    with pytest.raises(SetupError, match="another model or machine than the instance: device cpu, not cuda; --force"):
        _compare(profile, live, force=False)
    assert _compare(profile, live, force=True)
    assert "device cpu, not cuda." in capsys.readouterr().out
