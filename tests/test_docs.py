"""Consistency of single documents with the code: flags, metrics, request fields, error codes, paths, the ten steps."""

import importlib.util
import json
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import POLICY_NAMES
from pdserve.counters import GAUGES, HELP
from pdserve.lifetime import Stage
from pdserve.router.api import parsing, schemas
from pdserve.router.api.field_texts import FIELDS
from pdserve.router.api.openapi import openapi_document
from pdserve.router.dialects.messages import schemas as messages
from pdserve.router.dialects.responses import schemas as responses

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("docs/**/*.md")})
REFERENCE = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
assert REFERENCE is not None and REFERENCE.loader is not None
reference = importlib.util.module_from_spec(REFERENCE)
REFERENCE.loader.exec_module(reference)
CODE = ("pdserve", "kernels", "prefill", "decode", "kv_transfer", "router")


def read(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def tracked() -> list[str]:
    """Return every file tracked by git."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listing.stdout.decode().split("\0") if (ROOT / name).is_file()]


def source_files() -> list[str]:
    """Return the non-empty Python files of the package."""
    files = [name for name in tracked() if name.endswith(".py") and name.split("/")[0] in CODE]
    return [name for name in files if (ROOT / name).stat().st_size > 0]


def section(name: str, heading: str) -> str:
    """Return the text under a heading, up to the next heading of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", read(name), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{name} has no heading {heading!r}"
    return found[1]


def first_column(text: str) -> list[str]:
    """Return the code spans in the first cell of each table row."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


# ---- flags and metrics ----------------------------------------------------------------------------------------------


def known_flags() -> set[str]:
    return {flag for _, command in reference.all_commands() for option in command.params for flag in option.opts}


def known_metrics() -> set[str]:
    names = {f"pdserve_{name}" + ("" if name in GAUGES else "_total") for name in HELP}
    for family in reference.router_metrics():
        names.add(family.name + ("_total" if family.type == "counter" else ""))
    return names


def test_every_flag_says_what_it_means() -> None:
    silent = [
        f"{name} {option.opts[0]}"
        for name, command in reference.all_commands()
        for option in command.params
        if option.opts[0].startswith("--") and not (option.help or "").strip()
    ]
    assert len(list(reference.all_commands())) > 15 and not silent


def test_every_metric_says_what_it_means() -> None:
    families = reference.router_metrics()
    assert len(families) > 30 and not [family.name for family in families if not family.documentation.strip()]
    assert not [name for name, text in HELP.items() if not text.strip()]


def test_the_reference_pages_have_every_flag_and_metric(tmp_path: Path) -> None:
    reference.main(tmp_path)
    fields = (tmp_path / "fields.md").read_text()
    assert "| `messages` | array of " in fields and "](#answertokens)" in fields, "fields have types"
    flags = first_column((tmp_path / "flags.md").read_text())
    assert set(flags) == {flag for flag in known_flags() if flag.startswith("--")} - {"--help"}
    assert set(first_column((tmp_path / "metrics.md").read_text())) == known_metrics()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_metrics_in_documents_exist(document: Path) -> None:
    named = set(re.findall(r"`(pdserve_[a-z0-9_]+)", document.read_text()))
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in named} <= known_metrics()


def test_no_public_name_of_the_last_release_is_gone() -> None:
    released, now = json.loads(read("tests/public.json")), reference.public_names()
    for command, flags in released["flags"].items():
        assert not set(flags) - set(now["flags"].get(command, [])), command
    assert not released["metrics"].items() - now["metrics"].items()
    assert not set(released["paths"]) - set(now["paths"])
    for name, fields in released["frames"].items():  # a change needs another `PROTOCOL_VERSION`
        assert set(fields) <= set(now["frames"][name]), name


# ---- docs/api.md --------------------------------------------------------------------------------------------------


def test_every_field_of_the_api_says_what_it_means() -> None:
    document = openapi_document(reference.routes(), "demo", {})
    named, silent = {"model"}, []
    for schema, described in document["components"]["schemas"].items():
        for field, properties in described["properties"].items():
            named |= {field, f"{schema}.{field}"}
            silent += [f"{schema}.{field}"] * ("description" not in properties)
    for path, operations in document["paths"].items():
        for parameter in (one for operation in operations.values() for one in operation.get("parameters", ())):
            named.add(parameter["name"])
            silent += [f"{path} {parameter['name']}"] * ("description" not in parameter)
    assert not silent and len(named) > 200
    assert not set(FIELDS) - named, "texts of fields that no schema has"


@pytest.mark.parametrize(
    ("where", "no_ops"),
    [
        ("completions, chat", schemas.NO_OPS),
        ("a message", schemas.MESSAGE_NO_OPS),
        ("responses", responses.RESPONSES_NO_OPS),
        ("messages", messages.MESSAGES_API_NO_OPS),
    ],
)
def test_fields_without_effect_are_listed_with_the_values_that_they_may_have(where: str, no_ops: parsing.NoOps) -> None:
    table = section("docs/api.md", "Accepted without effect")
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {where} |")]
    accepted, refused = row.split("; never ")
    for name, values in no_ops.items():
        assert (f"`{name}`" in accepted) == bool(values) and (f"`{name}`" in refused) == (not values), name
    assert set(re.findall("`([a-z_]+)`", row)) - {"true", "false"} == set(no_ops)


def test_endpoint_table_lists_every_path() -> None:
    listed = {name.split()[-1] for name in first_column(section("docs/api.md", "Endpoints"))}
    assert listed == {path.replace("{model:path}", "{model}") for path in reference.paths()}


def test_error_table_lists_every_code() -> None:
    files = [
        name for name in source_files() if not name.startswith("kv_transfer/")
    ]  # connector failures have separate kinds
    codes = {kind for name in files for kind in re.findall(r'(?:\bkind=|_KIND = )"([a-z_]+)"', read(name))}
    assert set(first_column(section("docs/api.md", "Errors"))) == codes


def test_policy_table_lists_every_policy() -> None:
    assert tuple(first_column(section("docs/operations.md", "Policies"))) == POLICY_NAMES


# ---- docs/architecture.md -----------------------------------------------------------------------------------------


def test_every_function_of_the_ten_steps_exists() -> None:
    text = section("docs/architecture.md", "One request in ten steps")
    assert [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)] == list(range(1, 11))
    named = re.findall(r"`([\w/]+\.py):(?:(\w+)\.)?(\w+)`", text)
    assert len(named) >= 20
    missing = []
    for file, owner, name in named:
        code = read(file)
        if not re.search(rf"def {name}\(", code) or (owner and not re.search(rf"^class {owner}\b", code, re.MULTILINE)):
            missing.append(f"{file}:{name}")
    assert not missing


def test_the_ten_steps_take_at_most_15_files_to_read() -> None:
    text = section("docs/architecture.md", "One request in ten steps")
    to_open = re.findall(r"▸ (`.*?)(?=\(|\n\d+\. |\Z)", text, re.DOTALL)
    assert len(to_open) == 10
    assert len({file for functions in to_open for file in re.findall(r"`([\w/]+\.py):", functions)}) <= 15


def test_the_path_is_as_long_as_the_ten_steps_say(load_test_module: Callable[[str], Any]) -> None:
    text = section("docs/architecture.md", "One request in ten steps")
    for name, most in load_test_module("test_walk").MOST.items():
        assert f"{most} {name}" in text


def test_package_table_lists_every_package() -> None:
    listed = {name.rstrip("/") for name in first_column(section("docs/architecture.md", "Core and extensions"))}
    assert not [name for name in listed if not (ROOT / name).exists()]
    packages = {Path(name).parent.as_posix() for name in source_files()}
    inside = {
        "pdserve/engine/architectures",
        "pdserve/engine/cpu_fusion",
        "pdserve/engine/memory",
        "pdserve/engine/parallel",
        "pdserve/engine/scheduling",
    }
    packages = {name for name in packages if not name.startswith("kv_transfer/")}  # which lists its own
    assert packages - inside <= listed | {"router"}


def test_every_stage_is_explained() -> None:
    text = read("docs/architecture.md")
    assert not [stage for stage in Stage if f"`{stage}`" not in text]


# ---- docs/security.md ---------------------------------------------------------------------------------------------


def test_the_figures_of_attacks_are_those_of_the_results() -> None:
    text = read("docs/security.md").partition("`scripts/attacks`")[2].partition("## ")[0]
    file = re.search(r"\((\.\./benchmarks/results/.*?\.json)\)", text)
    assert file is not None
    rows = {(row["kind"], row["arm"]): row for row in json.loads(read(f"docs/{file[1]}"))["rows"]}
    kinds = {kind for kind, arm in rows if arm == "attack"}

    def ratio(kind: str) -> float:
        attack, control = rows[kind, "attack"], rows[kind, "control"]
        return max(float(attack[name] / control[name]) for name in ("ttft_ms_p99", "e2e_ms_p99"))

    worst = max(kinds, key=ratio)
    assert f"Of {len(kinds)} (" in text and f"control's for {sum(ratio(kind) <= 1.5 for kind in kinds)};" in text
    assert f"{max(rows[kind, 'attack']['mib_more'] for kind in kinds)} MiB at most" in text
    ttfts = [rows[worst, arm]["ttft_ms_p99"] for arm in ("attack", "control")]
    assert f"{worst.replace('_', ' ')} (TTFT {ttfts[0]} ms, control {ttfts[1]})" in " ".join(text.split())


# ---- README.md ----------------------------------------------------------------------------------------------------


def test_the_figures_of_faults_are_those_of_the_benchmark() -> None:
    table = section("benchmarks/README.md", "chaos.py")
    faults = re.search(r"^\| faults \| (\d+):", table, re.MULTILINE)
    answers = re.search(r"^\| answers with exactly [^|]*\| ([\d,]+) ", table, re.MULTILINE)
    assert faults is not None and answers is not None
    assert f"with {faults[1]} injected faults, {answers[1]} answers in bfloat16" in read("README.md")


# ---- all files -----------------------------------------------------------------------------------------------------


HOMES = ("work", "root", "Users", r"home(?!/pdserve\b)")  # /home/pdserve is the home of the image's user
PRIVATE = re.compile(rf"(?<![\w.~-])/(?:{'|'.join(HOMES)})/")


def test_no_file_contains_a_private_path() -> None:
    found = []
    for name in tracked():
        try:
            text = read(name)
        except UnicodeDecodeError:
            continue
        found += [f"{name}:{number}" for number, line in enumerate(text.splitlines(), 1) if PRIVATE.search(line)]
    assert not found


def test_private_paths_are_found() -> None:
    for home in ("work", "root", "Users", "home"):
        assert PRIVATE.search(f'open("/{home}/me/x")') and not PRIVATE.search(f"https://example.org/{home}/x")
    assert not PRIVATE.search("WORKDIR /home/pdserve")
