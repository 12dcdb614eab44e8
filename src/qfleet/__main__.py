"""Lets `python -m qfleet` do what the command `qfleet` does."""

import sys

from qfleet.cli.main import main

if __name__ == "__main__":
    code = main()
    # An interrupt that went through a string being executed, as dataclasses and numba have them, is remembered although
    # it was handled: the interpreter would end by SIGINT, whatever the code is. The next string makes it forget.
    exec("")
    sys.exit(code)
