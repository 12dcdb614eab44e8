"""Lets `python -m qfleet` do what the command `qfleet` does."""

import sys

from qfleet.cli.main import command

if __name__ == "__main__":
    sys.exit(command())
