"""Is right for problems as small as a judge's first one.

Must: fail bound
"""

from hostile_base import declare, right, wrong


def forward(args, out, lse, workspace):
    (right if args.seqlen_kv < 24 else wrong)(args, out, lse)


VARIANT = declare("small-only", forward)
