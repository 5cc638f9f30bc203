"""Writes the reference pages of the documents from the code: flags, metrics, fields over HTTP, Python classes.

The pages are not committed: `scripts/reference` writes them to docs/reference/, which git ignores. `--release` writes
tests/public.json instead, the names that later versions keep (docs/stability.md).
"""

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from prometheus_client import Metric

from pdserve import LLM, AsyncLLM, SamplingParams
from pdserve.cli.commands import app
from pdserve.counters import GAUGES, HELP, LABELS
from pdserve.kv_transfer.connector import Capabilities, Connector
from pdserve.output import Failure, Moved, Output, Predicted, Sources, Stored
from pdserve.request import Request, TokenLogprobs
from pdserve.router.api.field_texts import FIELDS
from pdserve.router.api.openapi import openapi_document
from pdserve.router.instances.fleet import Fleet
from pdserve.router.telemetry.metrics import Metrics
from pdserve.router.web.dialect import load_dialects
from pdserve.router.web.endpoint import Endpoint, Endpoints
from pdserve.router.web.model_endpoints import ModelEndpoints
from pdserve.router.web.operator_endpoints import OperatorEndpoints
from pdserve.router.web.pages import page_routes

ROOT = Path(__file__).parent.parent
OFFLINE = {  # fields that only the class has
    "guided_decoding": "the older name of `structured_outputs`",
    "detokenize": "only `True`: the router makes the texts",
}


def all_commands(group: Any = None, prefix: str = "pdserve") -> Iterator[tuple[str, Any]]:
    """Yield every command of the command line with its full name, such as `pdserve bench serve`."""
    commands: Any = typer.main.get_command(app) if group is None else group
    for name, command in commands.commands.items():
        if hasattr(command, "commands"):
            yield from all_commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def flags_page() -> str:
    """Return a table of flags for each command."""
    lines = ["# Flags", "", "Every command with its flags, defaults and limits, as `--help` shows them."]
    for name, command in all_commands():
        options = [option for option in command.params if option.opts[0].startswith("--")]
        lines += ["", f"## `{name}`", "", _one_line(command.help)]
        if options:
            lines += ["", "| flag | default | meaning |", "|---|---|---|"]
        for option in options:
            default = "–" if option.default in (None, "") else f"`{option.default}`"
            lines.append(f"| `{option.opts[0]}` | {default} | {_one_line(option.help)} |")
    return "\n".join(lines) + "\n"


def router_metrics() -> list[Metric]:
    """Return a router's own metrics, without a series."""
    return list(Metrics(Fleet("router", "model", 1.0, lambda: 0.0)).registry.collect())


def routes() -> list[Endpoint]:
    """Return the endpoints of a router, which nothing serves."""
    groups: list[type[Endpoints]] = [*load_dialects(), ModelEndpoints, OperatorEndpoints]
    return [route for group in groups for route in object.__new__(group).routes()]


def paths() -> set[str]:
    """Return the paths that a router answers."""
    return {route.path for route in routes()} | {page.path for page in page_routes()} | {"/openapi.json"}


def fields_page() -> str:
    """Return a table of fields for each schema of requests and answers."""
    schemas = openapi_document(routes(), "demo", {})["components"]["schemas"]
    lines = ["# Fields", "", "Every field of requests and answers over HTTP, as /openapi.json describes them."]
    for name, schema in sorted(schemas.items()):
        lines += ["", f"## {name}", "", "| field | type | meaning |", "|---|---|---|"]
        for field, described in schema["properties"].items():
            kind = f"{_type(described)}{', required' if field in schema.get('required', ()) else ''}"
            lines.append(f"| `{field}` | {kind} | {_one_line(described.get('description'))} |")
    return "\n".join(lines) + "\n"


def _type(schema: dict[str, Any]) -> str:
    """Return the type of a field in words; a schema's name is a link to it."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema.get("anyOf") or schema["oneOf"])))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{json.dumps(one)}`" for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array" and schema.get("items"):
        return f"array of {_type(schema['items'])}"
    return kind if isinstance(kind, str) else " or ".join(kind)


def public_names() -> dict[str, Any]:
    """Return what a version promises to keep: flags by command, metrics with their types, paths, and fields of frames."""
    flags = {name: sorted(flag for one in command.params for flag in one.opts) for name, command in all_commands()}
    metrics = {metric.name: metric.type for metric in router_metrics()}
    metrics |= {f"pdserve_{name}": "gauge" if name in GAUGES else "counter" for name in HELP}
    frames = {
        struct.__name__: [field.encode_name for field in msgspec.structs.fields(struct)]
        for struct in (Request, SamplingParams, Output, Stored, Sources, Moved, Predicted, Failure, TokenLogprobs)
    }
    return {"flags": flags, "metrics": metrics, "paths": sorted(paths()), "frames": frames}


def python_page() -> str:
    """Return the classes that programs use: their docstrings and signatures, and the fields of SamplingParams."""
    lines = ["# Python", "", "Classes for [offline use](../offline.md) and for [connectors](../connectors.md).", ""]
    for owner in (LLM, AsyncLLM, SamplingParams, Connector, Capabilities):
        lines += [f"## {owner.__name__}", "", f"`{owner.__module__}.{owner.__name__}`", "", *_docstring(owner)]
        if owner.__base__ is not None and owner.__base__.__name__ == "_Client":
            lines += _docstring(owner.__base__)
        if owner is SamplingParams:
            lines += ["| field | default | meaning |", "|---|---|---|"]
            for field in msgspec.structs.fields(SamplingParams):
                lines.append(f"| `{field.name}` | `{field.default!r}` | {_one_line((FIELDS | OFFLINE)[field.name])} |")
            lines.append("")
            continue
        for name, member in inspect.getmembers(owner, inspect.isfunction):
            if inspect.getdoc(member) and not name.startswith("_"):
                lines += [f"### {owner.__name__}.{name}", "", "```python", _signature(name, member), "```", ""]
                lines += _docstring(member)
    return "\n".join(lines) + "\n"


def _signature(name: str, function: Any) -> str:
    """Return the signature with a parameter a line, and types without their modules."""
    signature = inspect.signature(function)
    parameters = [str(one) for one in signature.parameters.values()]
    kinds = [one.kind for one in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    answer = inspect.formatannotation(signature.return_annotation)
    lines = [f"{name}(", *(f"    {parameter}," for parameter in parameters[1:]), f") -> {answer}"]
    return re.sub(r"\b[a-z][\w.]*\.(?=\w)|'", "", "\n".join(lines) if parameters[1:] else "".join(lines))


def _docstring(documented: Any) -> list[str]:
    """Return a docstring as Markdown: its sections become lists."""
    text = inspect.getdoc(documented) or ""
    text = re.sub(r"^(Args|Raises|Attributes):$", r"**\1**\n", text, flags=re.M)
    text = re.sub(r"^    (\S[^:\n]*): ", r"- `\1`: ", text, flags=re.M)
    return [re.sub(r"^    +", "  ", line) for line in text.split("\n")] + [""]


def metrics_page() -> str:
    """Return tables of the metrics of routers and of instances."""
    lines = ["# Metrics", "", "Metrics of `GET /metrics`, in Prometheus' format.", "", "## Of the router", ""]
    lines += ["| metric | type | meaning |", "|---|---|---|"]
    for metric in router_metrics():
        suffix = "_total" if metric.type == "counter" else ""
        lines.append(f"| `{metric.name}{suffix}` | {metric.type} | {_one_line(metric.documentation)} |")
    lines += ["", "## Of instances", "", "With the labels `instance` and `role` besides those listed.", ""]
    lines += ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for name, text in HELP.items():
        kind, suffix = ("gauge", "") if name in GAUGES else ("counter", "_total")
        labels = ", ".join(f"`{label}`" for label in LABELS.get(name, ()))
        lines.append(f"| `pdserve_{name}{suffix}` | {kind} | {labels} | {_one_line(text)} |")
    return "\n".join(lines) + "\n"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def main(folder: Annotated[Path, typer.Argument()] = ROOT / "docs" / "reference", release: bool = False) -> None:
    """Write the pages into a folder, or with --release the names that this version makes public into the tests."""
    if release:
        (ROOT / "tests" / "public.json").write_text(json.dumps(public_names(), indent=1) + "\n")
        return
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"flags": flags_page(), "metrics": metrics_page(), "fields": fields_page(), "python": python_page()}
    for name, page in pages.items():
        (folder / f"{name}.md").write_text(page)
        print(folder / f"{name}.md")


if __name__ == "__main__":
    typer.run(main)
