"""Core and extensions: the import rules of docs/architecture.md, checked on the import statements."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("prefill", "decode", "kv_transfer", "router", "proto", "kernels")  # folders to which pdserve/ has links


def names(text: str) -> list[str]:
    return text.split()


# What a prompt touches by default, from HTTP to kernel and back, and what all of it shares: packages and files.
CORE = names("""
    request output keys kv_spec config cores settings costs counters errors lifetime slo sizes plugins parent priority
    model_path reasoning pooling speculative_config beam_search logits_processors grammars lines
    proto kernels kv_transfer engine roles prefill decode instance control profile
    router.api router.text router.web router.parse_server router.limits router.routed_request
    router.backend router.dispatch router.scheduling router.instances router.telemetry router.server
""")
# Everything else. Core runs it only by name: through an entry point of pyproject.toml, or as a command.
EXTENSIONS = names("""
    __main__ cli offline admin_client server_url batch launchers ranks
    tools
    kernels.gpu engine.gpu engine.low_bit speculation adapters
    interop router.dialects router.rpc router.kv_events
    kv_transfer.connectors.redis kv_transfer.connectors.nixl kv_transfer.connectors.mooncake kv_transfer.connectors.tiered
    kv_transfer.rules kv_transfer.conformance kv_transfer.bench kv_transfer.check_command kv_transfer.pytest_plugin
""")

# Part → all that it may import of ours.
IMPORTS_ONLY = {
    "kernels": {"kernels"},
    "kv_transfer": {"kv_transfer", "keys", "costs", "errors", "sizes"},
    "proto": {"proto"},
    "tools.bench": {
        "tools.bench",
        "tools.load_config",
        "tools",
        "lines",
        "config",
        "admin_client",
        "server_url",
        "errors",
        "slo",
        "sizes",
        "__init__",
    },
}
# Part → what it never imports. Frames connect a router with instances, and hand-overs connect the roles.
SERVING = {"prefill", "decode", "roles", "engine", "kernels", "kv_transfer", "instance", "ranks"}
NEVER_IMPORTS = {part: {"router"} for part in SERVING} | {
    "router": SERVING,
    "prefill": {"router", "decode"},
    "decode": {"router", "prefill"},
}
LAZY = {"cli": SERVING | {"router"}}  # imported only inside functions, so that `--help` answers without delay
READING_ORDER = "In reading order:"  # in the docstring of a package, before the names of its files and packages
UNORDERED = ("pdserve/engine", "kernels", "proto", "pdserve/demo_model")  # packages whose docstrings name no files

# Decision logic: plain Python on plain data. The time, random numbers and connections come from the caller.
DECISION_FILES = (
    "pdserve/costs",
    "pdserve/engine/scheduling/budget",
    "pdserve/engine/scheduling/levels",
    "pdserve/engine/scheduling/preemption",
    "pdserve/engine/scheduling/schedule",
    "pdserve/engine/memory/blocks",
    "pdserve/engine/memory/sequence_kv",
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
    "pdserve/tools/bench": {"command", "http_client", "load", "server", "traces", "workers"},
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


@cache
def imports_of(source: str) -> tuple[Import, ...]:
    return tuple(_imports(ast.parse(source), late=False))


def _imports(node: ast.AST, late: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(name.name, late, child.lineno) for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            yield from (Import(f"{child.module}.{name.name}", late, child.lineno) for name in child.names)
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):  # which imports nothing
            yield from _imports(child, late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def part_of(module: str, parts: Iterable[str]) -> str:
    """Return the longest of the parts that a module such as `router.web.app` belongs to; "" if there is none."""
    names = module.split(".")
    prefixes = {".".join(names[:length]) for length in range(1, len(names) + 1)}
    return max(prefixes.intersection(parts), key=len, default="")


def is_extension(module: str) -> bool:
    part = part_of(module, [*CORE, *EXTENSIONS])
    assert part or module == "__init__", f"{module} is neither of the core nor an extension: add it to a list"
    return part in EXTENSIONS


def ours(statement: Import) -> str | None:
    """Return the imported module of ours, such as `router.web.app`; None for other packages."""
    first, _, module = statement.module.partition(".")
    if first in LINKED:
        raise AssertionError(f"import pdserve.{statement.module}, not {statement.module}")
    return _existing(module) if first == "pdserve" else None


@cache
def _existing(name: str) -> str:
    """Return the module of a name in it, such as `errors` for `errors.SetupError`."""
    found = part_of(name, modules())
    return found or "__init__"


@cache
def modules() -> dict[str, Path]:
    """Return every source file by its module, such as `router.web.app`."""
    found = {}
    for path in [path for name in ("pdserve", *LINKED) for path in (ROOT / name).rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[1:] if parts[0] == "pdserve" else parts)
        found[name.removesuffix(".__init__")] = path
    return found


def violations(module: str, source: str) -> list[str]:
    """Return one line for each import that a rule forbids."""
    wrong = []
    for statement in imports_of(source):
        target = ours(statement)
        if target is None:
            continue
        where = f"{module}, line {statement.line}: imports {target}"
        if not is_extension(module) and is_extension(target):
            wrong.append(f"{where}, which is an extension: load it by name (pdserve/plugins.py)")
        for part, allowed in IMPORTS_ONLY.items():
            if part_of(module, [part]) and not part_of(target, allowed):
                wrong.append(f"{where}; {part} imports only {', '.join(sorted(allowed))}")
        for part, forbidden in NEVER_IMPORTS.items():
            if part_of(module, [part]) and part_of(target, forbidden):
                wrong.append(f"{where}, which {part} never does")
        for part, late in LAZY.items():
            if part_of(module, [part]) and part_of(target, late) and not statement.late:
                wrong.append(f"{where} outside of a function")
    return wrong


def test_imports_follow_the_rules() -> None:
    found = [wrong for module, path in modules().items() for wrong in violations(module, path.read_text())]
    assert not found, "\n".join(found)


def test_every_listed_part_exists() -> None:
    assert not [part for part in [*CORE, *EXTENSIONS] if not any(part_of(name, [part]) for name in modules())]
    assert not set(CORE) & set(EXTENSIONS)


def test_no_files_import_each_other() -> None:
    graph = {
        name: {
            target for one in imports_of(path.read_text()) if not one.late and (target := ours(one)) not in (None, name)
        }
        for name, path in modules().items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


def test_extensions_are_entry_points_of_ours() -> None:
    """What the core asks for by name is in pyproject.toml, and of an extension."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    entries = groups["pdserve.extensions"] | groups["pdserve.dialects"]
    assert all(is_extension(target.partition(":")[0].removeprefix("pdserve.")) for target in entries.values())
    asked = {name for path in modules().values() for name in re.findall(r'extension\("([\w-]+)"\)', path.read_text())}
    assert asked == groups["pdserve.extensions"].keys()


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
    """Yield every package but those of the engine and the kernels, and the folders at the root."""
    for path in {path.parent for path in modules().values()} - {ROOT / "pdserve"}:
        if (path / "__init__.py").exists() and not any(path.is_relative_to(ROOT / name) for name in UNORDERED):
            yield path


def test_packages_name_their_files_in_reading_order() -> None:
    packages = list(packages_in_reading_order())
    assert len(packages) > 20
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
    ("module", "source"),
    [
        ("router.dispatch.selector", "from pdserve.engine.engine import Engine"),
        ("router.server", "def late():\n    import pdserve.kv_transfer.registry"),
        ("router.server", "def late():\n    from pdserve.router.rpc.server import make_server"),
        ("router.web.dialect", "from pdserve.router.dialects.embeddings import Vectors"),
        ("prefill.prefiller", "from pdserve.decode.decoder import Decoder"),
        ("kv_transfer.url", "from pdserve.config import EngineConfig"),
        ("kernels.batch", "from pdserve.keys import Layout"),
        ("engine.engine", "from pdserve.kernels.gpu import draw"),
        ("config", "from pdserve.cli.commands import main"),
        ("config", "import pdserve.__main__"),
        ("cli.up", "from pdserve.router.server import serve"),
    ],
)
def test_forbidden_imports_are_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


def test_allowed_imports_are_accepted() -> None:
    assert not violations("cli.up", "def router():\n    from pdserve.router.server import serve")
    assert not violations("prefill.prefiller", "import torch\nfrom pdserve.errors import SetupError")
    assert not violations("ranks.leader", "from pdserve import __version__, plugins")
    assert not violations("config", "if TYPE_CHECKING:\n    from pdserve.cli.up import up")
    with pytest.raises(AssertionError, match=r"import pdserve\.router\.web"):
        violations("config", "import router.web")


def run_without(blocked: list[str], code: str) -> str:
    """Run code in a new interpreter in which some packages cannot be imported, and return its output."""
    lines = [f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))", code]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    return result.stdout


def imported_with(modules_: Iterable[str]) -> set[str]:
    """Return the other packages that are imported along with modules of ours, and those that these import of ours."""
    seen, due, others = set[str](), [*modules_], set[str]()
    while due:
        name = due.pop()
        if name in seen:
            continue
        seen.add(name)
        for statement in imports_of(modules()[name].read_text()):
            if not statement.late:
                target = ours(statement)
                others |= {statement.module.partition(".")[0]} if target is None else set()
                due += [] if target is None else [target]
        package = name.rpartition(".")[0]
        due += [package] if package in modules() else []
    return others


SERVING_PACKAGES = {"fastapi", "starlette", "uvicorn", "grpc", "zmq", "redis", "flash_attn", "nixl"}


def test_engine_and_kernels_import_without_the_serving_packages() -> None:
    parts = ("engine", "engine.memory", "engine.cpu_fusion", "kernels")
    found = [name for name in modules() if name.rpartition(".")[0] in parts and name not in parts]
    assert len(found) > 30
    others = imported_with(found)
    assert "torch" in others and not others & SERVING_PACKAGES
    assert imported_with(["router.web.app"]) >= {"fastapi", "starlette"}, "what is imported is found"


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
