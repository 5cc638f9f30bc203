"""The command line. Heavy imports wait until a command needs them, so that `--help` and mistakes answer at once."""

import json
import os
import signal
import sys
from types import ModuleType
from typing import cast

import typer

from pdserve import __version__
from pdserve.cli import logs
from pdserve.cli.flags import command_of
from pdserve.config import DEFAULT_PORT, InstanceConfig, RouterConfig, UpConfig
from pdserve.errors import SetupError

app = typer.Typer(
    help="Disaggregated prefill/decode LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
ROUTER = typer.Option(
    f"http://127.0.0.1:{DEFAULT_PORT}", help="URL of a router of the instance; its --admin-key from PDSERVE_ADMIN_KEY"
)
connector_app = typer.Typer(help="KV connectors: what is installed, what holds, how fast.", no_args_is_help=True)
app.add_typer(connector_app, name="connector")


def up(config: UpConfig) -> None:
    """Start a router and its instances on this machine, and serve until Ctrl-C."""
    from pdserve.cli.up import up as run

    run(config)


def demo(config: UpConfig) -> None:
    """Start everything, send one chat request, show what happened, stop everything."""
    from pdserve.cli.demo import demo as run

    run(config)


def router(config: RouterConfig) -> None:
    """Start one router, or several on one port."""
    if config.workers > 1:
        from pdserve.cli.workers import workers

        workers(config)
        return
    logs.set_up(config.log_format)
    # A router needs a tokenizer of transformers', which imports torch where it finds it: 2 seconds and 300 MB for nothing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one at a time: no threads for batches
    sys.modules.setdefault("torch", cast(ModuleType, None))  # "not found", as the reference of `import` has it
    from pdserve.router.server import serve

    serve(config)


def instance(config: InstanceConfig, role: str) -> None:
    """Start one instance and attach it to its routers."""
    logs.set_up(config.log_format)
    from pdserve.instance.process import serve

    serve(role, config)


def doctor() -> None:
    """Say what this machine can run, and what is missing for what."""
    from pdserve.cli.doctor import doctor as run

    run()


def drain(instance_id: str = typer.Argument(help="as in /debug/instances"), router: str = ROUTER) -> None:
    """Make an instance hand over or finish what it has, and end; returns when it has. `up` starts it again."""
    from pdserve.cli.operate import drain as run

    run(router, instance_id)


def role(
    instance_id: str = typer.Argument(help="as in /debug/instances"),
    role: str = typer.Argument(help="prefill, decode or both"),
    router: str = ROUTER,
) -> None:
    """Give an instance another role: it drains, keeps its weights, and serves on; returns when it does."""
    from pdserve.cli.operate import take_role as run

    run(router, instance_id, role)


def version() -> None:
    """Print the version."""
    print(__version__)


@connector_app.command("list")
def connector_list(as_json: bool = typer.Option(False, "--json", help="print JSON")) -> None:
    """Show the connectors that are installed, from which package, for which contract version, and if they can be used."""
    from pdserve.kv_transfer.conformance import list_connectors

    rows = list_connectors()
    if as_json:
        print(json.dumps([vars(row) for row in rows], indent=2))
        return
    lines = [("URL", "package", "version", "contract", "usable")]
    for row in rows:
        contract = "unknown" if row.contract is None else str(row.contract)
        usable = f"{'yes' if row.usable else 'no'}{': ' if row.why else ''}{row.why}"
        lines.append((f"{row.scheme}://", row.package, row.version, contract, usable))
    widths = [max(map(len, column)) + 2 for column in list(zip(*lines, strict=True))[:-1]] + [0]
    for line in lines:
        print("".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


@connector_app.command("check")
def connector_check(
    url: str = typer.Argument(help="the connector's URL; its store is written to"),
    as_json: bool = typer.Option(False, "--json", help="print JSON"),
    rule: list[str] = typer.Option([], help="only this rule; may be given several times"),  # noqa: B008
    seconds: float = typer.Option(2.0, min=0.1, help="how long rules that try at random go on"),
) -> None:
    """Try every rule of the connector contract against a store, and say what holds. Exit code 1 where one does not."""
    from pdserve.kv_transfer.conformance import run
    from pdserve.kv_transfer.connectors.shm import removing_new_segments

    with removing_new_segments(url):
        passed = run(url, rule, seconds, as_json)
    if not passed:
        raise typer.Exit(1)


@connector_app.command("bench")
def connector_bench(
    url: str = typer.Argument(help="the connector's URL; its store is written to"),
    block_bytes: str = typer.Option("1MiB", help="size of a block"),
    blocks: str = typer.Option("1,16,64", help="blocks per operation"),
    concurrency: str = typer.Option("1,4", help="operations under way at once"),
    seconds: float = typer.Option(1.0, min=0.05, help="how long each combination is measured"),
    json_file: str = typer.Option("", "--json", help="write the figures to this file, or - for the output"),
    plot_file: str = typer.Option("", "--plot", help="draw them into this file; needs matplotlib"),
) -> None:
    """Measure bandwidth and latency of store and load, beside a plain copy of the same bytes in the same run."""
    from pdserve.kv_transfer.bench import run
    from pdserve.kv_transfer.connectors.shm import removing_new_segments

    with removing_new_segments(url):
        run(url, block_bytes, blocks, concurrency, seconds, json_file, plot_file)


app.command("up")(command_of(UpConfig, up))
app.command("demo")(command_of(UpConfig, demo))
app.command("router")(command_of(RouterConfig, router))
for _role in ("prefill", "decode", "both"):
    app.command(_role, help=f"Start one {_role} instance and attach it to its routers.")(
        command_of(InstanceConfig, instance, role=_role)
    )
app.command("drain")(drain)
app.command("role")(role)
app.command("doctor")(doctor)
app.command("version")(version)


def main() -> None:
    """Start-up errors are one line on stderr and exit code 2."""
    # torch's own allocator reads this once: large tensors, weights above all, go into huge pages where the system allows.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # As a container's first process we would otherwise not hear SIGTERM before a server installs its own handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logs.set_up()
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:
        if message := error.format_message():  # else there were no arguments at all, and the help has been shown
            print(f"pdserve: error: {message.rstrip('.')} (see --help)", file=sys.stderr)
        raise SystemExit(2) from error
    except SetupError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        raise SystemExit(2) from error
