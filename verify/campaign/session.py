"""The process of a campaign, and of the suite: pytest, whose workers a starter forks.

`python -m verify.campaign.session ARGUMENTS` takes pytest's.  It imports what all workers need
before pytest begins; execnet, by which pytest-xdist starts its workers, then gets forks.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Any

from verify.cell.fork_server import CHILD, environment_of
from verify.machine import device, leash, starter
from verify.machine.extras import lacking
from verify.machine.starter_process import leave

# What a campaign's processes import sooner or later.  The command line is not among it: it decides
# at its import whether it writes to a terminal.
_MODULES = (
    "torch",
    "pytest",
    "verify.campaign.conclusion",
    "verify.document.terminal",
)
_PICTURES = "matplotlib.backends.backend_svg"  # of the report
_CAMPAIGN = "verify.campaign.chosen"  # the plugin among the arguments of a campaign's session


def main() -> int:
    """Run pytest with the arguments of this program; returns its exit code."""
    parent = os.environ.pop(leash.PARENT, None)
    if parent is not None:
        leash.die_with(int(parent))
    starter.adopt()
    # numpy would start threads, and a process with threads must not fork.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not starter.has(starter.CELLS):
        starter.start(starter.CELLS, CHILD, environment_of(()))
    asked = device.ask_gpus()
    for module in _MODULES:
        import_module(module)
    # A campaign draws at its end, when there is something to draw.
    if _CAMPAIGN not in sys.argv and lacking("matplotlib") is None:
        import_module(_PICTURES)
    _prepare()
    device.know_gpus(asked)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages
    starter.begin(starter.JUDGES)
    _fork_workers()
    import pytest

    # Plugins are imported already, so their assertions are not rewritten; and `_prepare` has drawn
    # before Hypothesis's plugin begins.
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    quiet += ["-W", "ignore::hypothesis.errors.HypothesisSideeffectWarning"]
    return int(pytest.main([*quiet, *sys.argv[1:]]))


def _prepare() -> None:
    """Do once what each worker would do before its first case.

    Hypothesis reads the constants in the sources of all modules when it draws for the first time.
    """
    from hypothesis import strategies as st

    from verify.oracles import oracles
    from verify.problem import Problem
    from verify.problem.sampling import draws

    oracles()
    some = st.integers(1, 2)
    shape = dict.fromkeys(("seqlen_q", "seqlen_kv", "head_dim"), some)
    draws(st.builds(Problem, **shape, dtype=st.just("float16")), 1)


def _fork_workers() -> None:
    """Let execnet get its processes from the starter."""
    from execnet import gateway_base, gateway_io

    class Worker(gateway_io.Popen2IOMaster):
        """A forked process and its pipes."""

        def __init__(self, args: list[str], execmodel: Any) -> None:
            if args[0] != sys.executable or not starter.has(starter.JUDGES):
                super().__init__(args, execmodel)
                return
            theirs, requests = os.pipe()
            answers, ours = os.pipe()
            program = starter.Program(
                module="verify.campaign.worker",
                environment=os.environ,
                given=theirs,
                output=ours,
                errors=2,
                leashed=True,
            )
            self.popen = starter.launch(starter.JUDGES, program)
            os.close(theirs)
            os.close(ours)
            pipes = os.fdopen(requests, "wb", -1), os.fdopen(answers, "rb", -1)
            gateway_base.Popen2IO.__init__(self, *pipes, execmodel=execmodel)

    vars(gateway_io)["Popen2IOMaster"] = Worker  # execnet has no other way


if __name__ == "__main__":
    leave(main())
