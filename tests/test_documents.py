"""Every document: its links lead somewhere, its commands parse, the flags that it names exist, and it is not too long."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from pdserve import config
from pdserve.cli.commands import app
from pdserve.tools import load_config

ROOT = Path(__file__).parent.parent
FOLDERS = ("", "benchmarks/", "benchmarks/traces/", "docs/", "docs/decisions/", "examples/*/")
DOCUMENTS = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}*.md"))]
EACH = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
# Commands of programs that tests do not have, by how they begin.
UNCHECKED = [
    "docker rm",
    "docker stop",
    "helm uninstall",
    "kubectl patch",
    "kubectl port-forward",
    "kubectl rollout",
    "lm_eval",
    "ray start",
    "smg launch",
]
# Flags of other programs, which documents name by themselves.
OTHERS_FLAGS = {"-e", "-t", "-march", "-variant", "--build", "--scale", "--shm-size", "--pd-disaggregation"}
CONFIGS: dict[str, Any] = {
    "up": config.UpConfig,
    "demo": config.DemoConfig,
    "router": config.RouterConfig,
    **dict.fromkeys(("prefill", "decode", "both"), config.InstanceConfig),
    "profile": load_config.ProfileConfig,
    "plan": load_config.PlanConfig,
    "simulate": load_config.SimulateConfig,
    "autoscale": load_config.AutoscaleConfig,
    "bench serve": load_config.BenchServeConfig,
    "bench tune": load_config.BenchTuneConfig,
}
LARGEST = {"README.md": 6, "CHANGELOG.md": 8, "benchmarks/README.md": 25, "docs/operations.md": 25}  # KB
ALL = 230


class Fence(NamedTuple):
    language: str
    text: str


def fences(document: Path) -> Iterator[Fence]:
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(), re.M | re.S):
        yield Fence(language, text)


def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def flags_of_scripts() -> set[str]:
    """Return the flags of benchmarks and scripts: quoted ones, and parameters of their main functions."""
    found = set()
    for folder in ("benchmarks", "scripts", "kv_transfer", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            found |= set(re.findall(r'"(--[a-z][\w-]+)"', text))
            if "typer" in text or " = flag(" in text:
                names = re.findall(r"^    (\w+): ", text, re.M) + re.findall(r"[(,] ?(\w+): ", text)
                found |= {"--" + name.replace("_", "-") for name in names}
    return found


@cache
def flags_of_pdserve() -> set[str]:
    def of(group: Any) -> Iterator[str]:
        for command in group.commands.values():
            yield from (
                of(command) if hasattr(command, "commands") else (flag for one in command.params for flag in one.opts)
            )

    return {*of(typer.main.get_command(app)), "--help", "--version", "--install-completion"}


# ---- checks of one command ------------------------------------------------------------------------------------------


def check_pdserve(words: list[str]) -> None:
    """Parse the arguments as the command line does, and let the command's settings check the values."""
    command: Any = typer.main.get_command(app)
    names: list[str] = []
    while hasattr(command, "commands"):
        names.append(words.pop(0))
        assert names[-1] in command.commands, f"pdserve has no command {' '.join(names)}"
        command = command.commands[names[-1]]
    with command.make_context(" ".join(names), words) as context:
        if settings := CONFIGS.get(" ".join(names)):
            settings(**context.params).check_effects()


def check_file(words: list[str]) -> None:
    """Ask for the script, and for a parameter or a string of each of its flags."""
    script = ROOT / words[0]
    assert script.is_file(), words[0]
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert flag in flags_of_scripts() or flag in script.read_text(), f"{words[0]} has no flag {flag}"


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(words) <= set(targets)


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    (target,) = [word for word in words[1:] if not word.startswith("-")]
    place, _, named = target.rstrip("]").partition("[")
    assert (ROOT / place / "pyproject.toml").is_file(), target
    assert {extra for extra in named.split(",") if extra} <= set(extras), target


def check_compose(words: list[str]) -> None:
    assert words[0] == "compose"
    assert all((ROOT / file).is_file() for flag, file in pairwise(words) if flag == "-f")


def check_helm(words: list[str]) -> None:
    assert words[0] == "install" and (ROOT / words[2] / "Chart.yaml").is_file()
    values = [file for flag, file in pairwise(words) if flag == "-f" and file != "values.yaml"]
    assert all((ROOT / file).is_file() for file in values)


def check_pytest(words: list[str]) -> None:
    assert all((ROOT / word).exists() for word in words if word.startswith("tests"))


def check_curl(words: list[str]) -> None:
    (url,) = [word for word in words if "localhost" in word or "127.0.0.1" in word]
    code = "".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    assert f'"/{url.partition("/")[2]}"' in code, f"no endpoint has this path: {url}"
    for flag, body in pairwise(words):
        if flag == "-d":
            json.loads(body)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "pdserve": check_pdserve,
    "make": check_make,
    "pip": check_pip,
    "docker": check_compose,
    "helm": check_helm,
    "pytest": check_pytest,
    "curl": check_curl,
    "python": check_file,
}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script, without the variables before it."""
    text = re.sub(r"(^|\s)# .*$", "", text.replace("\\\n", " "), flags=re.M)
    words = shlex.shlex(text, posix=True, punctuation_chars="&|;\n")
    words.whitespace, words.whitespace_split, words.commenters = " \t", True, ""
    command: list[str] = []
    for word in [*words, "\n"]:
        if set(word) <= set("&|;\n"):
            while command and re.match(r"[A-Z_]+=", command[0]):
                command.pop(0)
            if command:
                yield command
            command = []
        else:
            command.append(word)


def check(command: list[str]) -> None:
    name = command[0].removeprefix(".venv/bin/")
    if " ".join(command).startswith(tuple(UNCHECKED)):
        return
    if name.startswith(("scripts/", "benchmarks/")):
        check_file(command)
        return
    assert name in CHECKS, f"no test knows how to check {name}; see UNCHECKED"
    CHECKS[name](command[1:])


# ---- the tests ------------------------------------------------------------------------------------------------------


@EACH
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            target = (document.parent / file).resolve() if file else document
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@EACH
def test_commands_parse(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("PDSERVE_")]:
        monkeypatch.delenv(variable)
    for language, text in fences(document):
        if language == "sh":
            for command in commands(text):
                check(command)
        else:
            assert not re.search(r"^(\$ )?(.venv/bin/)?(pdserve|make|docker|curl|pip) (?!connector list)", text, re.M)
    for span in re.findall(r"`(pdserve [^`]+|make [a-z-]+)`", prose(document)):
        if not re.search(r"…|COMMAND|--help|--version", span):
            (command,) = commands(span.replace("\n", " "))
            try:
                check(command)
            except typer.BadParameter as error:
                assert "Missing" in str(error), span  # a sentence may leave out the arguments


@EACH
def test_other_languages_parse(document: Path) -> None:
    for language, text in fences(document):
        if language == "python":
            compile(text, document.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif language == "toml":
            tomllib.loads(text)
        elif language == "yaml":
            assert yaml.safe_load(text)
        elif language == "json":
            json.loads(text)
        else:
            assert language in ("", "sh"), language


@EACH
def test_flags_exist(document: Path) -> None:
    named = set(re.findall(r"`(--?[a-z][\w-]*)", prose(document)))
    unknown = named - flags_of_pdserve() - flags_of_scripts() - OTHERS_FLAGS
    assert not unknown


@EACH
def test_installations_name_an_extra_of_this_tree(document: Path) -> None:
    """The name pdserve is not on any index: `pip install pdserve` would install whatever is registered there."""
    text = document.read_text()
    assert not re.search(r"pip install ['\"]?pdserve", text)
    for command in re.findall(r"`(pip install [^`]+)`", prose(document)):
        check_pip(shlex.split(command)[1:])


def test_few_commands_are_left_unchecked() -> None:
    assert len(UNCHECKED) <= 10
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert not [one for one in UNCHECKED if one not in text], "no document has this command any more"


def test_documents_are_short() -> None:
    sizes = {document.relative_to(ROOT).as_posix(): document.stat().st_size for document in DOCUMENTS}
    assert not {name: sizes[name] for name, most in LARGEST.items() if sizes[name] > most * 1000}
    counted = {name: size for name, size in sizes.items() if not name.startswith(("examples/", "benchmarks/traces/"))}
    assert sum(counted.values()) <= ALL * 1000, counted


def test_the_site_has_every_document() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    named = [one.relative_to(ROOT).as_posix() for one in DOCUMENTS if one.is_relative_to(ROOT / "docs")]
    assert not [name for name in named if f" {name}\n" not in settings]


@pytest.mark.until_recorded("scripts/build_site.py", "scripts/site", "mkdocs.yml", "tests/test_documents.py")
def test_the_site_is_built_without_other_hosts(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="MkDocs is not installed: pip install -e '.[docs]'")
    built = subprocess.run([ROOT / "scripts/site", tmp_path], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    for page in (tmp_path / "index.html", tmp_path / "docs/reference/python/index.html"):
        assert not re.search(
            r"""<(script|img|iframe)[^>]* src="https?:|<link[^>]*stylesheet[^>]* href="http""", page.read_text()
        )


SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.dependabot": ".github/dependabot.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
}


def test_make_alone_lists_every_target() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [targets] = re.findall(r"^\.PHONY: help (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert sorted(re.findall(r"^  make ([a-z-]+) ", listed, re.M)) == sorted(targets.split())


def test_what_workflows_run_exists() -> None:
    for path in sorted(ROOT.glob(".github/workflows/*.yml")):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for run in (step["run"] for step in job["steps"] if "run" in step):
                for script in re.findall(r"(?<!\S)(?:scripts|\.ci|tests|deploy)/[\w./]+", run):
                    assert (ROOT / script).exists(), f"{path.name}: {script}"
                for target in re.findall(r"(?<!\S)make ([a-z-]+)", run):
                    check_make([target])


def test_on_an_index_the_links_of_the_readme_lead_to_the_repository(tmp_path: Path) -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["package"]["steps"]
    [script] = [step["run"] for step in steps if step.get("name", "").startswith("Links of README.md")]
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    environment = os.environ | {"GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v1"}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True)
    links = re.findall(r"(!?)\[[^]]*\]\(([^)\s]+)\)", prose(readme))
    base = "https://github.com/owner/name"
    assert len(links) > 15 and all("://" in link for _, link in links)
    assert ("!", f"{base}/raw/v1/docs/live-page.png") in links and ("", f"{base}/blob/v1/docs/slo.md") in links


@pytest.mark.parametrize("schema", SCHEMAS)
def test_workflows_are_valid(schema: str) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed: pip install -e '.[docs]'")
    files = sorted(ROOT.glob(SCHEMAS[schema]))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert files and checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    "command",
    [
        "pdserve up --prefil 1",
        "pdserve up --decode -1",
        "pdserve upp",
        "make tea",
        "pip install '.[gpu]'",
        "curl localhost:8000/v2/x",
        "benchmarks/none.py",
        "docker compose -f none.yml up",
        "bash -c ls",
    ],
)
def test_wrong_commands_are_found(command: str) -> None:
    with pytest.raises(Exception):  # noqa: B017  # AssertionError, or what the command line raises
        check(next(commands(command)))
