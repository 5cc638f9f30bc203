"""Commands derived from config dataclasses."""

import inspect
from dataclasses import dataclass, field

import pytest

from pdserve.cli.flags import command_from_config
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
