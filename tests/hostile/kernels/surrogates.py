"""Raises words that cannot be encoded: every report of the run would end in a traceback.

Must: fail execution: \\ud800
"""

from hostile_base import declare


def forward(args, out, lse, workspace):
    raise ValueError("tile \ud800 of \udcff, \u202eretrograde\u2066")


VARIANT = declare("surrogates", forward)
