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
                hints[field.name], typer.Option(help=describe(field), envvar=field.metadata["variable"])
            ],
        )
        for field in fields(config)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads the signature
    return command
