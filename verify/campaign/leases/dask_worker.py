"""A Dask worker that ends with the process that started it: `python -m` this module, with the
arguments of `dask worker`."""

from __future__ import annotations

import os
import sys

from verify.machine import leash


def main() -> None:
    """Run a nanny and its worker."""
    parent = os.environ.pop(leash.PARENT, None)
    if parent is not None:
        leash.die_with(int(parent))
    from distributed.cli.dask_worker import main as worker

    worker(args=sys.argv[1:], prog_name="dask worker")


if __name__ == "__main__":
    main()
