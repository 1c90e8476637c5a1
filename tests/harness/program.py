"""A program for a starter: it does what its first argument says."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time

from verify.machine import settings, starter

SAID = "STARTED_WITH"


def main() -> int:
    """tell: print what it got.  exit: end with that code.  kill: end by SIGKILL.  raise: fail.
    sleep: a minute.  hold: start a leashed sleeper, print its process id, and end.  adopt: start a
    program that tells, by the starter that this one is a fork of; print what it says, and the
    parent and the number of threads of this one."""
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
                "cores": sorted(os.sched_getaffinity(0)),
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
        case ["adopt", name]:
            starter.adopt()
            with tempfile.TemporaryFile("w+") as output:
                child = starter.Program(
                    module="tests.harness.program",  # which can be __main__ here
                    arguments=["tell"],
                    environment=os.environ | {"OMP_NUM_THREADS": "1"},
                    output=output.fileno(),
                )
                starter.launch(name, child).wait(60)
                output.seek(0)
                told = json.loads(output.read())
            here = {"mine": os.getppid(), "threads": os.environ.get("OMP_NUM_THREADS")}
            print(json.dumps(told | here | {"internal": settings.STARTER in os.environ}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
