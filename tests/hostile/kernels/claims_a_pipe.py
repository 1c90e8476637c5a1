"""Claims that a device without end is one of its sources.

Must: pass
"""

import sys
import types

from hostile_base import declare, right

module = types.ModuleType("endless")
module.__file__ = "/dev/zero"
sys.modules["endless"] = module


def forward(args, out, lse, workspace):
    right(args, out, lse)


VARIANT = declare("claims-a-pipe", forward)
