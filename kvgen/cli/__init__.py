"""One file per command: arguments in, exit code out."""
