"""``python -m kvgen``, and where the ``kvgen`` script begins."""

import sys


def main() -> None:
    """Run the command line; a Ctrl-C before it begins or after its end is quiet as well."""
    try:
        from kvgen.cli.main import main as run

        run()
    except KeyboardInterrupt:
        interrupts = sys.modules.get("kvgen.cli.interrupts")
        sys.exit(130 if interrupts is None else interrupts.exit_code(130))


if __name__ == "__main__":
    main()
