"""Calls its workspace by a name that a terminal obeys.

Must: fail execution: is not a name
"""

from hostile_base import declare, right


def workspace_of(args):
    return {"\x1b]0;holds\x07\ud800": ((4,), "float32")}


def forward(args, out, lse, workspace):
    right(args, out, lse)


VARIANT = declare("names-of-workspaces", forward, workspace=workspace_of)
