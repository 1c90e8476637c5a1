"""A program that runs another one as `python` would: a file, -m MODULE or -c TEXT, and its words.

A starter forks it with torch imported, which takes Python itself two seconds of CPU time.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Run what the first arguments name, as `__main__`."""
    match sys.argv[1:]:
        case ["-m", module, *words]:
            sys.argv[1:] = words
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", text, *words]:
            sys.argv = ["-c", *words]
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        case [path, *words]:
            sys.argv = [path, *words]
            runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main()
