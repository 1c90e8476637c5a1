"""`python -m verify`: set up the environment if it is missing, then the command line."""

from __future__ import annotations

import sys

from verify import bootstrap


def main() -> int:
    """Run the command line in an environment that has what it needs."""
    bootstrap.ensure()
    from verify.cli import main as cli

    return cli()


if __name__ == "__main__":
    sys.exit(main())
