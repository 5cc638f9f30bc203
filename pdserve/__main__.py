"""The `pdserve` command."""

import signal
import sys

from pdserve.cli.signals import exit_on_signals


def main() -> None:
    """Run the command line."""
    inherited = signal.getsignal(signal.SIGINT)  # background jobs of a shell ignore it
    exit_on_signals()
    if sys.argv[1:2] in (["demo"], ["up"]) and "--help" not in sys.argv:
        from pdserve.cli.fork_server import start_early

        start_early()
    from pdserve.cli.commands import main as run

    signal.signal(signal.SIGINT, inherited)
    run()


if __name__ == "__main__":
    main()
