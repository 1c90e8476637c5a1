"""Refuses, inside its declared support, what it would get wrong.

Must: fail execution: refuses a problem inside its declared support
"""

from hostile_base import declare, wrong

from verify.variant import Unsupported


def forward(args, out, lse, workspace):
    if args.seqlen_kv > 1:
        raise Unsupported("seqlen_kv", "is more than one")
    wrong(args, out, lse)


VARIANT = declare("refuses-the-hard", forward)
