"""`python -m verify`: set up the environment if it is missing, then the command line."""

from __future__ import annotations

from typing import NoReturn

from verify import bootstrap


def main() -> int:
    """Run the command line in an environment that has what it needs."""
    bootstrap.ensure()
    from verify.cli import main as cli

    return cli()


def program() -> NoReturn:
    """What `verify` starts: `main`, and a quick end."""
    status = main()
    from verify.machine.starter_process import leave

    leave(status)


if __name__ == "__main__":
    program()
