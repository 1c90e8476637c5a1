"""Imports the module that makes the judge's inputs, late, during a launch.

Must: fail execution: verify.problem.inputs is the judge's
"""

import importlib

from hostile_base import declare, right


def forward(args, out, lse, workspace):
    importlib.import_module("verify.problem.inputs")
    right(args, out, lse)


VARIANT = declare("borrows-the-inputs", forward)
