"""A child process in which Triton interprets, or compiles: a worker can have done neither."""

import subprocess
import tempfile

from verify.bundle import ROOT
from verify.cell.fork_server import environment_of
from verify.machine.starter import CELLS, Program, launch

_TIMEOUT = 300  # seconds


def in_child(*arguments: str, interpret: str = "1") -> subprocess.CompletedProcess[str]:
    """Run what `python` would with these arguments: a file, -m MODULE or -c TEXT.

    The suite's starter of cells forks it, if there is one: that has imported torch, and no Triton.
    """
    variables = {"TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        program = Program(
            module="tests.harness.script",
            arguments=arguments,
            environment=environment_of(()) | variables,
            output=output.fileno(),
            errors=errors.fileno(),
            directory=str(ROOT),
            leashed=True,
        )
        status = launch(CELLS, program).wait(_TIMEOUT)
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, status, output.read(), errors.read())
