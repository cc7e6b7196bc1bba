"""``python -m kvgen``."""

from kvgen.cli.main import main

main()
