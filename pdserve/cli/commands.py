"""Commands of the `pdserve` command line.

Heavy modules are imported inside the commands, so that `--help` and usage errors respond without delay.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

import typer

from pdserve import __version__
from pdserve.cli import logs
from pdserve.cli.flags import GroupedCommand, command_from_config
from pdserve.cli.signals import exit_on_signals, set_on_signals
from pdserve.config import DEFAULT_PORT, ROLES, DemoConfig, InstanceConfig, RouterConfig, UpConfig
from pdserve.errors import SetupError
from pdserve.model_path import check_model
from pdserve.parent import end_with_parent
from pdserve.tools.load_config import (
    AutoscaleConfig,
    BenchLatencyConfig,
    BenchServeConfig,
    BenchThroughputConfig,
    BenchTuneConfig,
    PlanConfig,
    ProfileConfig,
    SimulateConfig,
)

if TYPE_CHECKING:
    from httpx import Headers

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
ROUTER_OPTION = typer.Option(
    f"http://127.0.0.1:{DEFAULT_PORT}", help="URL of a router of the instance; its --admin-key from PDSERVE_ADMIN_KEY"
)
connector_app = typer.Typer(help="List, check and benchmark KV connectors.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure a server from outside, or a deployment of its own.", no_args_is_help=True)


def up(config: UpConfig) -> None:
    """Start a router and its instances on this machine and serve until Ctrl-C."""
    from pdserve.cli.up import up as run

    run(config)


def demo(config: DemoConfig) -> None:
    """Start a deployment, send one chat request, show its timeline, and stop the deployment."""
    from pdserve.cli.demo import demo as run

    run(config)


def router(config: RouterConfig) -> None:
    """Start one router, or several on one port."""
    if config.workers > 1:
        from pdserve.cli.workers import run_workers

        run_workers(config)
        return
    exit_on_signals()
    logs.configure(config.log_format)
    # A router uses only the tokenizers of transformers, which would import torch if present: 2 s and 300 MB for nothing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # silences "PyTorch was not found"
    # Texts are tokenized one at a time; threads for batches would be idle.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # None in sys.modules makes `import torch` fail as not found.
    sys.modules.setdefault("torch", cast(ModuleType, None))
    from pdserve.router.server import serve

    logs.take_over()
    serve(config)


def instance(config: InstanceConfig, role: str) -> None:
    """Start one instance and connect it to its routers."""
    exit_on_signals()
    logs.configure(config.log_format)
    check_model(config.model)  # before the imports, which take seconds
    import pdserve.engine.without_compiler  # noqa: F401 - before what imports transformers' models
    from pdserve.instance.process import serve

    logs.take_over()
    serve(role, config)


def doctor() -> None:
    """Report what this machine can run, and which optional features lack a dependency."""
    from pdserve.cli.doctor import doctor as run

    run()


def drain(instance_id: str = typer.Argument(help="as in /debug/instances"), router: str = ROUTER_OPTION) -> None:
    """Drain an instance: it migrates or finishes its requests and exits. Waits for that. `up` restarts the instance."""
    from pdserve.cli.operate import drain as run

    run(router, instance_id)


def role(
    instance_id: str = typer.Argument(help="as in /debug/instances"),
    role: str = typer.Argument(help="prefill, decode or both"),
    router: str = ROUTER_OPTION,
) -> None:
    """Change the role of an instance: it drains, keeps its weights and serves in the new role. Waits for that."""
    from pdserve.cli.operate import change_role as run

    run(router, instance_id, role)


def health(
    url: str = typer.Argument(f"http://127.0.0.1:{DEFAULT_PORT}", help="of a router, or of a --metrics-port"),
) -> None:
    """Exit with 0 if a router or an instance of this machine is ready, else with 1. TLS certificates are not verified."""
    from pdserve.cli.operate import health as run

    if not run(url):
        raise typer.Exit(1)


def version() -> None:
    """Print the version."""
    print(__version__)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def main_options(
    _: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="print the version"),
) -> None:
    """Disaggregated prefill/decode LLM serving."""


@connector_app.command("list")
def connector_list(as_json: bool = typer.Option(False, "--json", help="print JSON")) -> None:
    """List the installed connectors: package, version, contract version, and whether each can be used."""
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
    seconds: float = typer.Option(2.0, min=0.1, help="duration of each randomised rule"),
) -> None:
    """Check every rule of the connector contract. Exit code 1: a rule is broken; 3: less than half could be checked."""
    from pdserve.kv_transfer.check_command import run
    from pdserve.kv_transfer.connectors.shm.connector import removing_new_segments

    with removing_new_segments(url):
        code = run(url, rule, seconds, as_json)
    if code:
        raise typer.Exit(code)


@connector_app.command("bench")
def connector_bench(
    url: str = typer.Argument(help="the connector's URL; its store is written to"),
    block_bytes: str = typer.Option("1MiB", help="size of a block"),
    blocks: str = typer.Option("1,16,64", help="blocks per operation"),
    concurrency: str = typer.Option("1,4", help="concurrent operations"),
    seconds: float = typer.Option(1.0, min=0.05, help="duration of the measurement of each combination"),
    json_file: str = typer.Option("", "--json", help="write the results to this file, or - for stdout"),
    plot_file: str = typer.Option("", "--plot", help="plot the results into this file; needs matplotlib"),
) -> None:
    """Measure store and load beside a plain copy of the same bytes. Exit code 1: one of them moved no block."""
    from pdserve.kv_transfer.bench import run
    from pdserve.kv_transfer.connectors.shm.connector import removing_new_segments

    with removing_new_segments(url):
        moved = run(url, block_bytes, blocks, concurrency, seconds, json_file, plot_file)
    if not moved:
        raise typer.Exit(1)


def bench_serve(config: BenchServeConfig) -> None:
    """Send a load to an OpenAI-compatible server and report what clients see. Exit code 1: no request succeeded."""
    from pdserve.tools.bench.command import run

    if not run(config):
        raise typer.Exit(1)


def bench_offline(config: BenchLatencyConfig | BenchThroughputConfig) -> None:
    """Send batches of random prompts to a deployment of its own, and report in the lines of `vllm bench`."""
    from pdserve.tools.offline_bench import run

    run(config)


def bench_tune(config: BenchTuneConfig) -> None:
    """Find the split and the settings of a fleet with the most margin to an SLO, by measuring the most promising ones within
    a budget. Takes the flags of `pdserve up`. Exit code 3: the best does not meet the SLO."""
    from pdserve.tools.tuner.command import run

    if not run(config):
        raise typer.Exit(3)


def simulate(config: SimulateConfig) -> None:
    """Forecast what fleets would do with a load, from a profile, by simulating them."""
    from pdserve.tools.simulator.command import run

    run(config)


def plan(config: PlanConfig) -> None:
    """Find the smallest fleet that meets an SLO, and tell whether disaggregation pays. Exit code 3: none meets it; 1:
    --measured says that the profile is more than half off."""
    from pdserve.tools.planner.command import run

    if code := run(config):
        raise typer.Exit(code)


def autoscale(config: AutoscaleConfig) -> None:
    """Steer the numbers of prefill and decode instances of a running fleet, or advise on them, by forecasts."""
    from pdserve.launchers.launcher import launcher_of
    from pdserve.tools.autoscaler.command import run, simulate

    if config.simulate:
        simulate(config)
        return
    stop = threading.Event()
    set_on_signals(stop)
    run(config, stop, launcher_of(config.launcher) if config.launcher else None)


def profile(config: ProfileConfig) -> None:
    """Measure what a model costs on this machine, and write it to a file. Exit code 1: --compare found a drift."""
    from pdserve.cli.deployment import Deployment, free_port

    check_model(config.model)  # before the imports, which take seconds
    from pdserve.tools.profiling.command import run

    if not run(config, lambda settings: Deployment(replace(settings, port=free_port()), on_line=lambda line: None)):
        raise typer.Exit(1)


def batch(
    source: Path = typer.Argument(help="OpenAI's batch file: a request per line"),  # noqa: B008
    target: Path = typer.Argument(help="file of the answers; those that it has already are kept"),  # noqa: B008
    url: str = typer.Option("", help="URL of a running server, with its key in PDSERVE_API_KEY; empty: start one"),
    concurrency: int = typer.Option(64, min=1, help="requests that are under way at once"),
    model: str = typer.Option("demo", help="of the server that is started, as in `pdserve up`"),
    prefill: int = typer.Option(0, min=0, help="its prefill instances"),
    decode: int = typer.Option(0, min=0, help="its decode instances"),
    both: int = typer.Option(
        0, min=0, help="its instances with the role both; default: 1, without --prefill and --decode"
    ),
) -> None:
    """Answer the requests of a file. Exit code 1: some have no answer yet; the same command tries these again."""
    from pdserve.batch.command import run, server_at

    if url and (model != "demo" or prefill or decode or both):
        raise SetupError("--url names a running server: leave out --model, --prefill, --decode and --both")
    counts = {"prefill": prefill, "decode": decode, "both": both or int(not prefill and not decode)}
    if not run(source, target, server_at(url) if url else _server_of_its_own(model, counts), concurrency):
        raise typer.Exit(1)


@contextmanager
def _server_of_its_own(model: str, counts: dict[str, int]) -> Iterator[tuple[str, "Headers"]]:
    from pdserve.admin_client import key_header
    from pdserve.cli.deployment import free_port
    from pdserve.offline.llm import Fleet

    fleet = Fleet(UpConfig(model=model, port=free_port(), **counts))  # type: ignore[arg-type]
    try:
        yield fleet.url, key_header("the key of this server", fleet.api_key)
    finally:
        fleet.close()


def convert_gguf(
    source: Path = typer.Argument(help="GGUF file; a tokenizer.json beside it is taken before its own"),  # noqa: B008
    target: Path = typer.Argument(help="new directory, for --model"),  # noqa: B008
) -> None:
    """Write a GGUF file as a checkpoint: linear layers in Q4_0 and Q8_0 keep their bits, other types become dense."""
    from pdserve.cli.gguf import convert

    print(convert(source, target))


def serve(arguments: list[str] = typer.Argument(None)) -> None:  # noqa: B008
    """Name the command that does what `vllm serve MODEL` does."""
    model = next((one for one in arguments or () if not one.startswith("-")), "MODEL")
    one = f"pdserve up --model {model} --prefill 0 --decode 0 --both 1"
    raise SetupError(f"write `pdserve up --model {model}`, or, for one instance of both roles, `{one}`")


START, MEASURE, OPERATE = "Start", "Measure and plan", "Operate"
ROLE_HELP = "Start one {} instance and connect it to its routers."
CONFIGURED: list[tuple[str, type, Callable[..., None], str]] = [
    ("demo", DemoConfig, demo, START),
    ("up", UpConfig, up, START),
    ("router", RouterConfig, router, START),
    *((role, InstanceConfig, partial(instance, role=role), START) for role in ROLES),
    ("profile", ProfileConfig, profile, MEASURE),
    ("simulate", SimulateConfig, simulate, MEASURE),
    ("plan", PlanConfig, plan, MEASURE),
    ("autoscale", AutoscaleConfig, autoscale, MEASURE),
]
for _name, _config, _run, _panel in CONFIGURED:
    _help = ROLE_HELP.format(_name) if _name in ROLES else None
    app.command(_name, help=_help, cls=GroupedCommand, rich_help_panel=_panel)(command_from_config(_config, _run))
for _name, _config in (("latency", BenchLatencyConfig), ("throughput", BenchThroughputConfig)):
    bench_app.command(_name, cls=GroupedCommand)(command_from_config(_config, bench_offline))
bench_app.command("serve", cls=GroupedCommand)(command_from_config(BenchServeConfig, bench_serve))
bench_app.command("tune", cls=GroupedCommand)(command_from_config(BenchTuneConfig, bench_tune))
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
app.command("batch", rich_help_panel=START)(batch)
app.command("convert-gguf", rich_help_panel=START)(convert_gguf)
app.command("serve", hidden=True, context_settings={"ignore_unknown_options": True})(serve)
app.command("drain", rich_help_panel=OPERATE)(drain)
app.command("role", rich_help_panel=OPERATE)(role)
app.command("health", rich_help_panel=OPERATE)(health)
app.command("doctor", rich_help_panel=OPERATE)(doctor)
app.add_typer(connector_app, name="connector", rich_help_panel=OPERATE)
app.command("version", hidden=True)(version)


def main() -> None:
    """Run the command line. A start-up error is one line on stderr and exit code 2."""
    # Read once by torch's CPU allocator: puts large tensors, mainly weights, into huge pages where the system allows it.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    end_with_parent()
    logs.configure()
    # Typer would build the flags of all commands, which takes 20 ms.
    named = [command for command in app.registered_commands if [command.name] == sys.argv[1:2]]
    app.registered_commands = named or app.registered_commands
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:
        if message := error.format_message():  # empty if there were no arguments: the help was shown instead
            print(f"pdserve: error: {message.rstrip('.')} (see --help)", file=sys.stderr)
        raise SystemExit(2) from error
    except SetupError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        raise SystemExit(2) from error
