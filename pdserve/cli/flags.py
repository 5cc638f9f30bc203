"""Command-line flags from config dataclasses: one field, one flag, one default, one line of help."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from pdserve.errors import SetupError


def command_of(config: type, run: Callable[..., None], **extra: Any) -> Callable[..., None]:
    """A function whose signature is the dataclass's fields as typer options; it calls `run(config(...))`.

    `extra` fixes further keyword arguments of `run`.
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
            annotation=Annotated[hints[field.name], typer.Option(help=field.metadata["help"])],
        )
        for field in fields(config)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return command
