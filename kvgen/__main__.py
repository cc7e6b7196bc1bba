"""``python -m kvgen``, and where the ``kvgen`` script begins."""

import sys


def main() -> None:
    """Run the command line; a Ctrl-C while it is still being imported ends it quietly."""
    try:
        from kvgen.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
