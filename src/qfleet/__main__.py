"""Lets `python -m qfleet` do what the command `qfleet` does."""

import sys

from qfleet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
