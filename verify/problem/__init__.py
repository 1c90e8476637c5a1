"""Problem: the mathematics and the memory of one input, as one frozen value with a one-line name.

Here are the names that kernels and users import; the package's other modules make, draw and store
problems.
"""

from contextlib import suppress

from verify.machine.outside_file import OutsideFileError
from verify.problem import kind_files
from verify.problem.problem import Problem
from verify.problem.storage import EXPANSIONS, ORDERS, Layout, ProblemError, Storage

__all__ = ["EXPANSIONS", "ORDERS", "Layout", "Problem", "ProblemError", "Storage"]

with suppress(OutsideFileError):  # the command that names the files raises it
    kind_files.load()
