"""Puts a pipe among its sources; reading it never ends.

Must: not load: PermissionError
"""

import os
import sys
import types

from hostile_base import declare, right

path = os.path.join(os.path.dirname(__file__), "pipe.py")
os.mkfifo(path)
module = types.ModuleType("pipe")
module.__file__ = path
sys.modules["pipe"] = module


def forward(args, out, lse, workspace):
    right(args, out, lse)


VARIANT = declare("makes-a-pipe", forward)
