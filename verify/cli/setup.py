"""`verify setup`: install what no extra of the distribution can name."""

from __future__ import annotations

import click

from verify import bootstrap
from verify.campaign.runner import CLEAN
from verify.cli.options import console
from verify.machine.extras import lacking


@click.group()
def setup() -> None:
    """Install what a kind of kernel needs and no extra of the package can name."""


@setup.command()
def cute() -> int:
    """Install the headers that CuTe kernels include, with pip, into this environment.

    CUTLASS's package asks for others that no kernel needs, so it is installed without them; an
    extra cannot say that. The CUDA headers that CuTe includes are installed too. The compiler is
    the extra [cuda].
    """
    status = bootstrap.set_up_cute()
    if status == CLEAN:
        console.print("CUTLASS's headers are installed", highlight=False)
        missing = lacking("cuda")
        if missing is not None:
            console.print(f"still missing: {missing}", markup=False, highlight=False)
    return status
