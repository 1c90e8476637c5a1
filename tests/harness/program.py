"""A program for a starter: it does what its first argument says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from verify.machine import starter

SAID = "STARTED_WITH"


def main() -> int:
    """tell: print what it got.  exit: end with that code.  kill: end by SIGKILL.  raise: fail.
    sleep: a minute.  hold: start a leashed sleeper, print its process id, and end."""
    match sys.argv[1:]:
        case ["tell", *words]:
            told = {
                "words": words,
                "word": os.environ.get(SAID),
                "directory": os.getcwd(),
                "path": sys.path[0],
                "parent": os.getppid(),
                "leads": os.getsid(0) == os.getpid(),
                "descriptors": [n for n in range(256) if os.path.exists(f"/proc/self/fd/{n}")],
                "input": sys.stdin.read(),
            }
            print(json.dumps(told))
        case ["exit", code]:
            return int(code)
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["raise"]:
            raise ValueError("as it was told")
        case ["sleep"]:
            time.sleep(60)
        case ["hold", name]:
            sleeper = starter.Program(
                module=__name__, arguments=["sleep"], environment=os.environ, output=2, leashed=True
            )
            print(starter.launch(name, sleeper).pid, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
