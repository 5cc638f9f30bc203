"""Who may import whom: the walls of docs/architecture.md, read off the import statements."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("prefill", "decode", "kv_transfer", "router", "proto", "kernels")

# The modules that lie in pdserve/ itself, by layer.
CORE = {
    "",
    "break_even",
    "certificates",
    "config",
    "corked",
    "costs",
    "counters",
    "errors",
    "flags",
    "handover",
    "keys",
    "lifetime",
    "logs",
    "model_path",
    "registry",
    "request",
    "slo",
    "wire",
}
JOB = {"fetcher", "job", "transfers"}
INSTANCE = {"block_news", "instance", "link", "serve_instance"}
COMMANDS = {"__main__", "cli", "deployment", "demo", "doctor", "operate", "supervisor", "up", "workers"}

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "proto": set(),
    "kernels": set(),
    "engine": {"kernels", "core"},
    "kv_transfer": {"core"},
    "job": {"engine", "kv_transfer", "proto", "core"},
    "prefill": {"job", "engine", "kv_transfer", "proto", "core"},
    "decode": {"job", "engine", "kv_transfer", "proto", "core"},
    "instance": {"prefill", "decode", "job", "engine", "kv_transfer", "proto", "core"},
    "router": {"proto", "core"},
    "commands": {"core"},
}
# Inside of a function only, so that `--help` and mistakes answer at once.
MAY_IMPORT_LATE = {"commands": {"core", "router", "instance", "kv_transfer"}}

# The decisions: plain Python on plain data, with the time as an argument.
DECISIONS = (
    "break_even",
    "costs",
    "engine/block_pool",
    "engine/scheduler",
    "engine/sequence",
    "handover",
    "keys",
    "../router/pairs",
    "../router/policy",
    "../router/prefix_index",
)
NOT_IN_DECISIONS = {"torch", "transformers", "time", "asyncio", "socket", "threading", "redis", "starlette"}


@dataclass(frozen=True)
class Import:
    module: str
    late: bool  # inside of a function
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
    """The layer of `pdserve.router.fleet` or of `pdserve.errors.SetupError`; None for what is not ours."""
    first, _, rest = module.partition(".")
    if first in FOLDERS:
        raise AssertionError(f"import pdserve.{module}, not {module}")
    if first != "pdserve":
        return None
    name = rest.partition(".")[0]
    if name in (*FOLDERS, "engine"):
        return name
    layers = {"job": JOB, "instance": INSTANCE, "commands": COMMANDS}
    return next((layer for layer, modules in layers.items() if name in modules), "core")


def violations(layer: str, source: str) -> list[str]:
    """One line per import that crosses a wall."""
    wrong = []
    for one in imports_of(source):
        target = layer_of(one.module)
        allowed = MAY_IMPORT[layer] | (MAY_IMPORT_LATE.get(layer, set()) if one.late else set())
        if target is not None and target != layer and target not in allowed:
            wrong.append(f"line {one.line}: {layer} imports {one.module}, which is {target}")
    return wrong


def sources() -> Iterator[tuple[str, Path]]:
    """Every source file with its layer."""
    for folder in FOLDERS:
        yield from ((folder, path) for path in (ROOT / folder).rglob("*.py"))
    yield from (("engine", path) for path in (ROOT / "pdserve" / "engine").rglob("*.py"))
    for path in (ROOT / "pdserve").glob("*.py"):
        name = "" if path.stem == "__init__" else path.stem
        known = [("core", CORE), ("job", JOB), ("instance", INSTANCE), ("commands", COMMANDS)]
        layers = [layer for layer, modules in known if name in modules]
        assert len(layers) == 1, (
            f"{path.name} is new: say in this test, and in docs/architecture.md, to which layer it belongs"
        )
        yield layers[0], path


def test_nobody_crosses_a_wall() -> None:
    wrong, seen = [], set()
    for layer, path in sources():
        seen.add(layer)
        wrong += [f"{path.relative_to(ROOT)}, {what}" for what in violations(layer, path.read_text())]
    assert not wrong, "\n".join(wrong)
    assert seen == MAY_IMPORT.keys()


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_are_plain(name: str) -> None:
    path = ROOT / "pdserve" / f"{name}.py"
    used = {one.module.partition(".")[0] for one in imports_of(path.read_text())}
    assert not used & NOT_IN_DECISIONS


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("router", "from pdserve.engine.engine import Engine"),
        ("router", "def late():\n    import pdserve.kv_transfer.registry"),
        ("prefill", "from pdserve.decode.decoder import Decoder"),
        ("engine", "from pdserve import job"),
        ("kernels", "from pdserve.keys import Layout"),
        ("core", "from pdserve.cli import main"),
        ("commands", "from pdserve.router.server import serve"),
    ],
)
def test_the_rule_can_fail(layer: str, source: str) -> None:
    assert len(violations(layer, source)) == 1


def test_the_rule_lets_through_what_it_should() -> None:
    late = "def router():\n    from pdserve.router.server import serve"
    assert not violations("commands", late)
    assert not violations(
        "prefill", "import torch\nfrom pdserve.errors import SetupError\nfrom pdserve import __version__"
    )
    with pytest.raises(AssertionError, match=r"import pdserve\.router\.policy"):
        violations("core", "import router.policy")


def run_without(blocked: list[str], code: str) -> str:
    """Runs code in a fresh interpreter in which some packages cannot be imported; its output."""
    lines = [f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))", code]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_engine_and_kernels_import_without_the_serving_packages() -> None:
    modules = [f"pdserve.engine.{path.stem}" for path in (ROOT / "pdserve" / "engine").glob("[a-z]*.py")]
    modules += [f"pdserve.kernels.{path.stem}" for path in (ROOT / "kernels").glob("[a-z]*.py")]
    blocked = ["starlette", "uvicorn", "grpc", "zmq", "redis", "flash_attn", "nixl"]
    assert len(modules) > 8
    run_without(blocked, "\n".join(f"import {name}" for name in ["pdserve", *modules]))


def test_the_block_on_imports_can_fail() -> None:
    with pytest.raises(AssertionError, match="import of starlette halted"):
        run_without(["starlette"], "import starlette")


def test_the_command_line_starts_without_torch() -> None:
    code = "import pdserve.cli, pdserve.up, pdserve.demo; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert run_without([], code).split() == ["False", "False"]
