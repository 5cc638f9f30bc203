"""Commands derived from config dataclasses."""

import inspect
from dataclasses import dataclass, field

import pytest
import typer
from typer.testing import CliRunner

from pdserve.cli.flags import command_from_config
from pdserve.config import TransferConfig
from pdserve.errors import SetupError


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = field(default=3, metadata={"help": "the size"})

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("--size must be 0 or more")


def test_command_has_one_option_per_field_and_calls_run() -> None:
    calls: list[tuple[Config, str]] = []

    def run(config: Config, role: str) -> None:
        """Help text."""
        calls.append((config, role))

    command = command_from_config(Config, run, role="decode")
    (parameter,) = inspect.signature(command).parameters.values()
    assert (parameter.name, parameter.default, command.__doc__) == ("size", 3, "Help text.")
    command(size=5)
    assert calls == [(Config(size=5), "decode")]
    with pytest.raises(SetupError, match="--size must be 0 or more"):
        command(size=-1)


def test_a_flag_can_be_set_by_its_environment_variable() -> None:
    calls: list[TransferConfig] = []
    app = typer.Typer()
    app.command()(command_from_config(TransferConfig, calls.append))
    result = CliRunner().invoke(app, [], env={"PDSERVE_CONNECTOR": "shm://from-environment"})
    assert result.exit_code == 0 and calls[0].connector == "shm://from-environment"
    CliRunner().invoke(app, ["--connector", "shm://flag"], env={"PDSERVE_CONNECTOR": "shm://from-environment"})
    assert calls[1].connector == "shm://flag"
