"""Imports what makes the judge's inputs, late, when nobody looks at its imports any more.

Must: fail execution: verify.problem.inputs is the judge's
"""

import importlib

from hostile_base import declare, right


def forward(args, out, lse, workspace):
    importlib.import_module("verify.problem.inputs")
    right(args, out, lse)


VARIANT = declare("borrows-the-inputs", forward)
