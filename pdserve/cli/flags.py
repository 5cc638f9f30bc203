"""Command-line flags derived from config dataclasses: each field is one flag with its default and line of help."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from pdserve.errors import SetupError
from pdserve.settings import describe

VLLM_FLAGS = {  # by its names
    "--enable-prefix-caching": ["--prefix-caching", "on"],
    "--no-enable-prefix-caching": ["--prefix-caching", "off"],
}


LORA_MODULES = "--lora-modules"


class GroupedCommand(TyperCommand):
    """A command whose help lists the flags of each config class under a heading, with whole names at any width."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.rich_markup_mode = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(parameter.name == "prefix_caching" for parameter in self.params):
            args = [given for arg in args for given in VLLM_FLAGS.get(arg, [arg])]
        if args.count(LORA_MODULES) or any(arg.startswith(f"{LORA_MODULES}=") for arg in args):
            args = _joined(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                group = getattr(parameter, "rich_help_panel", None) or "Options"
                groups.setdefault(group, []).append((", ".join(parameter.opts), record[1]))
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def _joined(args: list[str]) -> list[str]:
    """Return the arguments with one --lora-modules for all of its values: it may be repeated and, as vLLM's, have several."""
    others, values, follows = list[str](), list[str](), False
    for arg in args:
        if arg.startswith(f"{LORA_MODULES}="):
            values.append(arg.removeprefix(f"{LORA_MODULES}="))
        elif follows and not arg.startswith("-"):
            values.append(arg)
            continue
        elif arg != LORA_MODULES:
            others.append(arg)
        follows = arg == LORA_MODULES
    return [*others, f"{LORA_MODULES}={','.join(values)}"]


def command_from_config(config: type, run: Callable[..., None], **extra: Any) -> Callable[..., None]:
    """Return a typer command whose options are the fields of the settings `config`.

    The command calls `run(config(...), **extra)`, and raises SetupError if the config rejects its values, or one of them has
    no effect. Its help text is
    the docstring of `run`.
    """
    hints, headings = get_type_hints(config), _headings(config)

    def command(**values: Any) -> None:
        try:
            settings = config(**values)
            settings.check_effects()
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
                    help=describe(field),
                    envvar=field.metadata["variable"],
                    rich_help_panel=headings[field.name],
                ),
            ],
        )
        for field in fields(config)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads the signature
    return command


def _headings(config: type) -> dict[str, str | None]:
    """Return the heading of each field: that of the last `group` up to it in its class, else of its class; None if none."""
    declaring = {name: base for base in reversed(config.__mro__) for name in inspect.get_annotations(base)}
    headings: dict[str, str | None] = {}
    latest: dict[type, str | None] = {}
    for field in fields(config):
        base = declaring[field.name]
        latest[base] = field.metadata["group"] or latest.get(base, base.__dict__.get("GROUP"))
        headings[field.name] = latest[base]
    return headings
