"""A worker of pytest-xdist, as execnet starts one by `python -c`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the line of Python that comes on standard input."""
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
