"""Layering: the import rules of docs/architecture.md, checked on the import statements."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("prefill", "decode", "kv_transfer", "router", "proto", "kernels")  # folders to which pdserve/ has links

# Layer (a folder) → layers that it may import besides itself. `core` is pdserve/ itself. A file directly in router/ is a
# separate layer.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "proto": set(),
    "kernels": set(),
    "lines": set(),
    "control": {"core"},
    "grammars": {"core"},
    "engine.cpu_fusion": {"kernels"},
    "engine.gpu_fusion": {"engine.cpu_fusion", "kernels"},
    "engine.parallel": {"core"},
    "engine": {"engine.cpu_fusion", "engine.gpu_fusion", "engine.parallel", "kernels", "grammars", "profile", "core"},
    "kv_transfer": {"core"},
    "kv_transfer.connectors": {"kv_transfer", "core"},
    "roles": {"engine", "kv_transfer", "proto", "core"},
    "prefill": {"roles", "engine", "kv_transfer", "proto", "core"},
    "decode": {"roles", "engine", "kv_transfer", "proto", "core"},
    "ranks": {"decode", "roles", "engine", "engine.parallel", "kv_transfer", "kernels", "core"},
    "instance": {
        "prefill",
        "decode",
        "roles",
        "ranks",
        "engine",
        "engine.parallel",
        "kv_transfer",
        "profile",
        "control",
        "proto",
        "core",
    },
    "router.scheduling": {"core"},
    "router.limits": {"router.telemetry", "control", "core"},
    "router.instances": {"router.scheduling", "control", "proto", "core"},
    "router.kv_events": {"router.scheduling", "control", "core"},
    "router.telemetry": {"router.instances", "router.scheduling", "control", "core"},
    "router.backend": {"router.telemetry", "core"},
    "router.client_connection": set(),
    "router.storage": {"router.api", "control", "core"},
    "router.dispatch": {
        "router.backend",
        "router.instances",
        "router.scheduling",
        "router.telemetry",
        "proto",
        "core",
    },
    "router.text": {"router.backend", "grammars", "core"},
    "router.api": {"router.text", "router.backend", "router.client_connection", "grammars", "core"},
    "router.parse_server": {"router.api", "router.text", "core"},
    "router.web": {
        "router.client_connection",
        "router.parse_server",
        "router.api",
        "router.backend",
        "router.dispatch",
        "router.instances",
        "router.limits",
        "router.storage",
        "router.telemetry",
        "router.text",
        "control",
        "grammars",
        "core",
    },
    "router.batches": {"router.client_connection", "router.web", "router.api", "router.storage", "batch", "core"},
    "router.rpc": {
        "router.client_connection",
        "router.web",
        "router.api",
        "router.backend",
        "router.limits",
        "router.telemetry",
        "router.text",
        "control",
        "core",
    },
    "router.server": {
        "router.batches",
        "router.parse_server",
        "router.kv_events",
        "router.rpc",
        "router.web",
        "router.dispatch",
        "router.instances",
        "router.limits",
        "router.scheduling",
        "router.storage",
        "router.telemetry",
        "router.text",
        "control",
        "grammars",
        "core",
    },
    "bench": {"lines", "core"},
    "batch": {"core"},
    "launchers": {"core"},
    "simulator": {
        "router.dispatch",
        "router.instances",
        "router.limits",
        "router.telemetry",
        "instance",
        "engine",
        "kv_transfer",
        "control",
        "proto",
        "bench",
        "profile",
        "core",
    },
    "profile": {"core"},
    "planner": {"simulator", "profile", "bench", "core"},
    "autoscaler": {"planner", "simulator", "profile", "bench", "router.telemetry", "launchers", "lines", "core"},
    "profile.steps": {"profile", "instance", "engine", "proto", "core"},
    "cli": {"lines", "core"},
    "offline": {"cli", "lines", "core"},
}
# Allowed only inside functions, so that `--help` and usage errors respond without delay.
MAY_IMPORT_LATE = {
    "cli": {
        "router.server",
        "router.web",
        "instance",
        "kernels",
        "kv_transfer",
        "kv_transfer.connectors",
        "batch",
        "bench",
        "offline",
        "profile",
        "simulator",
        "planner",
        "launchers",
        "autoscaler",
    },
    "profile": {"profile.steps", "instance", "engine", "kv_transfer", "kv_transfer.connectors"},
}
READING_ORDER = "In reading order:"  # in the docstring of a package, before the names of its files and packages

# Decision logic: plain Python on plain data. The time, random numbers and connections come from the caller.
DECISION_FILES = (
    "pdserve/control/awake_clock",
    "pdserve/costs",
    "pdserve/engine/scheduling/budget",
    "pdserve/engine/memory/block_pool",
    "pdserve/engine/memory/swap_space",
    "pdserve/engine/scheduling/scheduler",
    "pdserve/engine/sequence",
    "pdserve/engine/step",
    "pdserve/grammars/cache",
    "pdserve/grammars/limits",
    "pdserve/keys",
    "pdserve/profile/profile",
    "pdserve/profile/drift",
    "pdserve/roles/break_even",
    "decode/load_machine",
    "kv_transfer/breaker",
)
DECISION_FOLDERS = {  # folder → the only files in it that do I/O
    "pdserve/bench": {"command", "http_client", "load", "server", "traces", "workers"},
    "router/dispatch": set[str](),
    "router/instances": {"arrivals", "control_server"},
    "router/limits": {"shared_quota"},
    "router/scheduling": set[str](),
}
NOT_IN_DECISIONS = {
    *("torch", "transformers", "redis", "fastapi", "starlette", "uvloop"),
    *("asyncio", "concurrent", "multiprocessing", "subprocess", "threading"),
    *("select", "selectors", "socket", "ssl"),
    *("datetime", "time"),
    *("random", "secrets", "uuid"),
}


@dataclass(frozen=True)
class Import:
    module: str
    late: bool  # inside a function
    line: int


def imports_of(source: str) -> list[Import]:
    return list(_imports(ast.parse(source), late=False))


def _imports(node: ast.AST, late: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(name.name, late, child.lineno) for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            yield from (Import(f"{child.module}.{name.name}", late, child.lineno) for name in child.names)
        else:
            yield from _imports(child, late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def layer_of(module: str) -> str | None:
    """Return the layer of, for example, `pdserve.router.web.app` or `pdserve.errors.SetupError`; None for other packages."""
    first, *parts = module.split(".")
    if first in LINKED:
        raise AssertionError(f"import pdserve.{module}, not {module}")
    if first != "pdserve":
        return None
    if parts and parts[0] == "__main__":
        return "cli"
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in MAY_IMPORT), "core")


def violations(layer: str, source: str) -> list[str]:
    """Return one line per import that the table does not allow."""
    wrong = []
    for statement in imports_of(source):
        target = layer_of(statement.module)
        allowed = MAY_IMPORT[layer] | (MAY_IMPORT_LATE.get(layer, set()) if statement.late else set())
        if target is not None and target != layer and target not in allowed:
            wrong.append(f"line {statement.line}: {layer} imports {statement.module}, which is {target}")
    return wrong


def sources() -> Iterator[tuple[str, Path]]:
    """Yield every source file with its layer."""
    for path in [path for name in ("pdserve", *LINKED) for path in (ROOT / name).rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts if parts[0] == "pdserve" else ("pdserve", *parts))
        layer = layer_of(module.removesuffix(".__init__"))
        assert layer is not None
        yield layer, path


def test_imports_follow_the_layers() -> None:
    wrong, seen = [], set()
    for layer, path in sources():
        seen.add(layer)
        wrong += [f"{path.relative_to(ROOT)}, {violation}" for violation in violations(layer, path.read_text())]
    assert not wrong, "\n".join(wrong)
    assert seen == MAY_IMPORT.keys()


def test_layers_are_acyclic() -> None:
    assert len(list(TopologicalSorter(MAY_IMPORT).static_order())) == len(MAY_IMPORT)


def test_every_folder_is_a_layer() -> None:
    """Every folder of pdserve/ and router/ has a line in the table."""
    folders = [path for name in ("pdserve", "router") for path in (ROOT / name).iterdir() if any(path.glob("*.py"))]
    folders = [path for path in folders if not path.is_symlink()]
    layers = [
        layer_of(f"pdserve.{path.name}" if path.parent.name == "pdserve" else f"pdserve.router.{path.name}")
        for path in folders
    ]
    assert len(folders) > 10 and "core" not in layers


def wrong_reading_order(package: Path) -> str:
    """Return how a package's files differ from those that its docstring names after "In reading order:", or ""."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    _, order, rest = docstring.partition(READING_ORDER)
    if not order:
        return f"{package.name}/__init__.py names no files: add a paragraph that begins with {READING_ORDER!r}"
    named = set(re.findall(r"\w+(?=[,.;])", rest.partition("\n\n")[0]))
    there = {path.stem for path in package.glob("[!_]*") if path.suffix == ".py" or (path / "__init__.py").exists()}
    changes = [f"+{name}" for name in sorted(there - named)] + [f"-{name}" for name in sorted(named - there)]
    return f"{package.name}/__init__.py: {' '.join(changes)}" if changes else ""


def packages_in_reading_order() -> Iterator[Path]:
    for path in {path.parent for _, path in sources()}:
        init = path / "__init__.py"
        if path.is_relative_to(ROOT / "kv_transfer") or (init.exists() and READING_ORDER in init.read_text()):
            yield path


def test_packages_name_their_files_in_reading_order() -> None:
    """Those of kv_transfer/ have to; others are compared if they do."""
    packages = list(packages_in_reading_order())
    assert len(packages) > 4
    assert not [wrong for package in packages if (wrong := wrong_reading_order(package))]


@pytest.mark.parametrize(
    ("docstring", "wrong"),
    [
        ("A pool.\n\nIn reading order: pool, rows,\nparts; the tests: check.", ""),
        ("A pool.\n\nIn reading order: pool, rows, check.", "+parts"),
        ("A pool.\n\nIn reading order: pool, rows, parts, check, other.\n\nMore, words.", "-other"),
        ("A pool.", "names no files"),
    ],
)
def test_a_wrong_reading_order_is_found(tmp_path: Path, docstring: str, wrong: str) -> None:
    for name in ("pool.py", "rows.py", "check.py", "parts/__init__.py", "data/file.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "__init__.py").write_text(f'"""{docstring}\n"""\n')
    found = wrong_reading_order(tmp_path)
    assert wrong in found and bool(wrong) == bool(found)


def decisions() -> Iterator[str]:
    yield from DECISION_FILES
    for folder, others in DECISION_FOLDERS.items():
        names = {path.stem for path in (ROOT / folder).glob("*.py")}
        assert others < names
        yield from (f"{folder}/{name}" for name in sorted(names - others))


def forbidden_in_decisions(source: str) -> set[str]:
    return {statement.module.partition(".")[0] for statement in imports_of(source)} & NOT_IN_DECISIONS


@pytest.mark.parametrize("name", list(decisions()))
def test_decision_logic_reads_no_clock_and_imports_no_io_and_no_torch(name: str) -> None:
    assert not forbidden_in_decisions((ROOT / f"{name}.py").read_text())


@pytest.mark.parametrize("source", ["import time", "from random import Random", "def f():\n    import torch.nn as nn"])
def test_forbidden_imports_of_decisions_are_found(source: str) -> None:
    assert len(forbidden_in_decisions(source)) == 1


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("router.dispatch", "from pdserve.engine.engine import Engine"),
        ("router.server", "def late():\n    import pdserve.kv_transfer.registry"),
        ("router.scheduling", "from pdserve.router.instances.fleet import Fleet"),
        ("router.api", "from pdserve.router.web import middleware"),
        ("router.text", "from pdserve.router.server import serve"),
        ("prefill", "from pdserve.decode.decoder import Decoder"),
        ("engine", "from pdserve.roles import job"),
        ("kv_transfer", "from pdserve.kv_transfer.connectors.shm import slab"),
        ("kernels", "from pdserve.keys import Layout"),
        ("core", "from pdserve.cli.commands import main"),
        ("core", "import pdserve.__main__"),
        ("cli", "from pdserve.router.server import serve"),
    ],
)
def test_forbidden_imports_are_found(layer: str, source: str) -> None:
    assert len(violations(layer, source)) == 1


def test_allowed_imports_are_accepted() -> None:
    assert not violations("cli", "def router():\n    from pdserve.router.server import serve")
    assert not violations(
        "prefill", "import torch\nfrom pdserve.errors import SetupError\nfrom pdserve import __version__"
    )
    with pytest.raises(AssertionError, match=r"import pdserve\.router\.web"):
        violations("core", "import router.web")


def run_without(blocked: list[str], code: str) -> str:
    """Run code in a new interpreter in which some packages cannot be imported, and return its output."""
    lines = [f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))", code]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_engine_and_kernels_import_without_the_serving_packages() -> None:
    folders = {name: f"pdserve/{name.replace('.', '/')}" for name in ("engine", "engine.memory", "engine.cpu_fusion")}
    folders["kernels"] = "kernels"
    modules = [
        f"pdserve.{name}.{path.stem}" for name, folder in folders.items() for path in (ROOT / folder).glob("[a-z]*.py")
    ]
    blocked = ["fastapi", "starlette", "uvicorn", "grpc", "zmq", "redis", "flash_attn", "nixl"]
    assert len(modules) > 8
    run_without(blocked, "\n".join(f"import {name}" for name in ["pdserve", *modules]))


def test_blocked_packages_cannot_be_imported() -> None:
    with pytest.raises(AssertionError, match="import of starlette halted"):
        run_without(["starlette"], "import starlette")


def test_command_line_starts_without_torch() -> None:
    code = "import pdserve.cli.commands, pdserve.cli.up, pdserve.cli.demo"
    code += "; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert run_without([], code).split() == ["False", "False"]


def test_checkout_without_links_is_reported(tmp_path: Path, load_test_module: Callable[[str], Any]) -> None:
    link_error = load_test_module("links").link_error
    assert link_error(ROOT) == ""
    for name in ("pdserve", "router"):
        (tmp_path / name).mkdir()
    (tmp_path / "pdserve" / "errors.py").touch()
    assert link_error(tmp_path) == ""
    (tmp_path / "pdserve" / "router").write_text("../router")
    assert link_error(tmp_path).startswith(
        "pdserve/router: in this checkout these are plain files and not symbolic links"
    )
