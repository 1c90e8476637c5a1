"""Lengths that a support has: the nearest to those that are wanted."""

from __future__ import annotations

from verify.problem.coverage import square_only
from verify.variant import Support
from verify.variant.support import up


def fitted(support: Support, seqlen_q: int, seqlen_kv: int) -> tuple[int, int]:
    """Lengths of the support near these: shorter if it has such, 0 for 0."""
    least, step = support.min_seqlen, support.common_multiple
    if seqlen_q == seqlen_kv or square_only(support):
        both = _down(max(seqlen_q, seqlen_kv), step, least)
        return both, both
    steps = (support.seqlen_q_multiple, support.seqlen_kv_multiple)
    rows, keys = (_down(n, s, least) for n, s in zip((seqlen_q, seqlen_kv), steps, strict=True))
    if rows > keys and not support.longer_q:
        rows, keys = (_down(n, s, least) for n, s in zip((seqlen_kv, seqlen_q), steps, strict=True))
        if rows > keys:  # two different steps
            rows = keys = _down(keys, step, least)
    return rows, keys


def raised(support: Support, seqlen_q: int, seqlen_kv: int) -> tuple[int, int]:
    """The least lengths of the support that are no less than these, equal ones if it needs them."""
    steps = (support.seqlen_q_multiple, support.seqlen_kv_multiple)
    rows, keys = (
        up(max(n, support.min_seqlen), s) for n, s in zip((seqlen_q, seqlen_kv), steps, strict=True)
    )
    if not support.cross_lengths:
        rows = keys = up(max(rows, keys), support.common_multiple)
    if rows > keys and not support.longer_q:
        keys = up(rows, support.seqlen_kv_multiple)
    return rows, keys


def _down(length: int, step: int, least: int) -> int:
    """The largest multiple up to that length, or the first one from `least` on; 0 for 0."""
    if not length:
        return 0
    down = length // step * step
    return down if down >= max(least, 1) else up(max(least, 1), step)
