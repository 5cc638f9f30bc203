"""The `pdserve` command."""

from pdserve.cli.signals import exit_on_signals


def main() -> None:
    """Run the command line."""
    exit_on_signals()
    from pdserve.cli.commands import main as run

    run()


if __name__ == "__main__":
    main()
