"""The command line. Heavy imports wait until a command needs them, so that `--help` and mistakes answer at once."""

import json
import logging
import sys

import typer

from pdserve import __version__
from pdserve.config import InstanceConfig, RouterConfig, UpConfig
from pdserve.errors import SetupError
from pdserve.flags import command_of

app = typer.Typer(
    help="Disaggregated prefill/decode LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
connector_app = typer.Typer(help="KV connectors: what is installed.", no_args_is_help=True)
app.add_typer(connector_app, name="connector")


def up(config: UpConfig) -> None:
    """Start a router and its instances on this machine, and serve until Ctrl-C."""
    from pdserve.up import up as run

    run(config)


def demo(config: UpConfig) -> None:
    """Start everything, send one chat request, show what happened, stop everything."""
    from pdserve.demo import demo as run

    run(config)


def router(config: RouterConfig) -> None:
    """Start one router."""
    from pdserve.router.server import serve

    serve(config)


def instance(config: InstanceConfig, role: str) -> None:
    """Start one instance and attach it to its routers."""
    from pdserve.serve_instance import serve

    serve(role, config)


def doctor() -> None:
    """Say what this machine can run, and what is missing for what."""
    from pdserve.doctor import doctor as run

    run()


def version() -> None:
    """Print the version."""
    print(__version__)


@connector_app.command("list")
def connector_list(as_json: bool = typer.Option(False, "--json", help="print JSON")) -> None:
    """Show the connectors that are installed, from which package, and for which contract version."""
    from pdserve.kv_transfer.registry import installed

    rows = installed()
    if as_json:
        print(json.dumps([vars(row) for row in rows], indent=2))
        return
    for row in rows:
        print(f"{row.scheme + '://':<14}{row.package:<12}{row.version:<10}{row.target}")


app.command("up")(command_of(UpConfig, up))
app.command("demo")(command_of(UpConfig, demo))
app.command("router")(command_of(RouterConfig, router))
for _role in ("prefill", "decode", "both"):
    app.command(_role, help=f"Start one {_role} instance and attach it to its routers.")(
        command_of(InstanceConfig, instance, role=_role)
    )
app.command("doctor")(doctor)
app.command("version")(version)


def main() -> None:
    """Start-up errors are one line on stderr and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    for noisy in ("httpx", "transformers", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        app()
    except SetupError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        raise SystemExit(2) from error
