"""The `pdserve` command."""

import signal

from pdserve.cli.signals import exit_on_signals


def main() -> None:
    """Run the command line."""
    inherited = signal.getsignal(signal.SIGINT)  # background jobs of a shell ignore it
    exit_on_signals()
    from pdserve.cli.commands import main as run

    signal.signal(signal.SIGINT, inherited)
    run()


if __name__ == "__main__":
    main()
