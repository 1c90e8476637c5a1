"""Heads: measure which key head each query head reads, for K and for V, with one winning key and
one value per head."""

from __future__ import annotations

import torch

from references.premises import Premise
from verify.judging.measuring import Measured, make_inputs, plain, result, run_probe
from verify.judging.trial import Trial
from verify.problem.known_answers import GATHER_NEEDS

# One key outweighs all other keys by its product.
NEEDS = GATHER_NEEDS | {Premise.VISIBLE_MASS_ONLY}
# exact in every format; its square times head_dim ** 0.5 is a gap of 250 already at head_dim 16
_GAIN = 8.0


def measure(trial: Trial) -> list[Measured]:
    """Measure the map from query heads to key heads.  Key g wins in key head g, so O names both
    heads that were read."""
    p = trial.problem
    if (
        p.heads_q == p.heads_kv
        or not plain(trial)
        or p.seqlen_kv < p.heads_kv
        or p.head_dim_v < 2
        or not p.seqlen_q
    ):
        return []
    k = torch.zeros(1, p.heads_kv, p.seqlen_kv, p.head_dim)
    v = torch.zeros(1, p.heads_kv, p.seqlen_kv, p.head_dim_v)
    heads = torch.arange(p.heads_kv)
    k[0, heads, heads] = _GAIN if p.scale >= 0 else -_GAIN
    v[..., 0] = heads[None, :, None] + 1.0
    v[..., 1] = torch.arange(p.seqlen_kv) % p.heads_kv + 1.0
    q = torch.full((1,), _GAIN)
    got = result(run_probe(trial, "heads", p, make_inputs(p, q, k, v)).first)[
        0, :, -1, :2
    ].double()  # the last row sees every key
    wanted = (torch.arange(p.heads_q) // p.group).tolist()
    word = "; ".join(
        f"{name} {_map(row, p.heads_kv, p.group)}"
        for name, row in (("V", got[:, 0]), ("K", got[:, 1]))
    )
    declared = f"V {_name(wanted, p.heads_kv, p.group)}; K {_name(wanted, p.heads_kv, p.group)}"
    evidence = f"{p.heads_q} query heads, {p.heads_kv} key heads"
    return [
        Measured(
            name="key head",
            word=word,
            declared=declared,
            contradicts=word != declared,
            evidence=evidence,
        )
    ]


def _map(row: torch.Tensor, heads_kv: int, group: int) -> str:
    near = row.round()
    if not bool(((row - near).abs() < 0.25).all()) or bool(((near < 1) | (near > heads_kv)).any()):
        return f"reads a mixture: {[round(float(x) - 1, 3) for x in row]}"
    return _name([int(x) - 1 for x in near], heads_kv, group)


def _name(heads: list[int], heads_kv: int, group: int) -> str:
    if heads == [h // group for h in range(len(heads))]:
        return "h // group"
    if heads == [h % heads_kv for h in range(len(heads))]:
        return "h % heads_kv"
    return f"reads {heads}"
