"""Command-line flags derived from config dataclasses: each field is one flag with its default and line of help."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from pdserve.config import describe
from pdserve.errors import SetupError


def command_from_config(config: type, run: Callable[..., None], **extra: Any) -> Callable[..., None]:
    """Return a typer command whose options are the fields of the dataclass `config`.

    The command calls `run(config(...), **extra)`, and raises SetupError if the config rejects its values. Its help text is
    the docstring of `run`.
    """
    hints = get_type_hints(config)

    def command(**values: Any) -> None:
        try:
            settings = config(**values)
        except ValueError as error:
            raise SetupError(str(error)) from error
        run(settings, **extra)

    command.__doc__ = inspect.getdoc(run)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[
                hints[field.name],
                typer.Option(
                    f"--{field.name.replace('_', '-')}",
                    help=describe(field),
                    envvar=field.metadata["variable"],
                    rich_help_panel=_group_of(config, field.name),
                ),
            ],
        )
        for field in fields(config)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads the signature
    return command


def _group_of(config: type, name: str) -> str | None:
    """Return the heading of the class that declares a field; None if it has none of its own."""
    declaring = next(base for base in config.__mro__ if name in inspect.get_annotations(base))
    group: str | None = declaring.__dict__.get("GROUP")
    return group
