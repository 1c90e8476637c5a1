"""Wants 1.9 GiB of scratch for the smallest problem, so that each case costs the judge a minute.

Must: fail execution: workspace
"""

from hostile_base import declare, right


def workspace_of(args):
    return {"scratch": ((1900 << 18,), "float32")}


def forward(args, out, lse, workspace):
    right(args, out, lse)


VARIANT = declare("vast-workspace", forward, workspace=workspace_of)
