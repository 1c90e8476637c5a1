"""The smallest fault of each class of docs/power.md that the rules of other suites catch, on inputs
of their own kind (`tests.faults.rivals`): `python -m tests.faults.rival_power` measures it again
and writes verify/report/rival_power.py.

The kernel is FlashAttention-2's arithmetic: fp32, with P and dS rounded to the inputs' dtype.  A
fault of the forward is looked for in O and LSE, one of the backward in the gradients.  It is caught
at a strength if a rule refuses a tensor of some problem, under both signs of the fault.  Problems
with a softcap or in 8 bits, and those on which a rule refuses the right kernel, are left out.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from tests.faults.rivals import GRADIENTS, RIVALS, Asked, Rival, Tensors, _dense, _eager
from verify.problem import Problem

FORWARD = ("scale", "exponent", "lse", "key", "out", "element", "noise")
BACKWARD = ("dq", "dk", "dv", "read_lse", "delta", "ds_pair", "ds_noise")
NOISE = {"noise": 7.0, "ds_noise": 7.0}  # log2 of the largest strength that is tried
ONE_SIGN = ("key", "ds_pair")
DTYPES = ("float16", "bfloat16")
MODULE = Path(__file__).parents[2] / "verify" / "report" / "rival_power.py"
_PROBLEMS = 3


def emulated(p: Problem, given: Tensors, fault: str = "", e: float = 0.0) -> dict[str, Tensor]:
    """O, LSE, dQ, dK and dV with a fault of that class and strength; empty rows give 0."""
    q, k, v = (given[name].float() for name in "qkv")
    k, v = (x.repeat_interleave(p.group, 1) for x in (k, v))
    dtype, seen = p.format.torch, _dense(p)
    empty = ~seen.any(-1, keepdim=True)
    scores = q @ k.mT * (p.scale * (1 + e * (fault == "scale")))
    scores = scores.masked_fill(~seen, -math.inf)
    top = torch.where(empty, 0.0, scores.amax(-1, keepdim=True))
    weights = torch.exp((scores - top) * (1 + e * (fault == "exponent")))
    weights = weights * (math.exp(e) if fault == "lse" else 1.0)
    total = torch.where(empty, 1.0, weights.sum(-1, keepdim=True))
    if fault == "key":
        weights = weights * ~_one(weights / total, e)
        total = torch.where(empty, 1.0, weights.sum(-1, keepdim=True))
    rounded = noisier(weights.to(dtype).float(), p, e * (fault == "noise"))
    out = (rounded @ v) / total
    if fault == "out":
        out = out * (1 + e)
    if fault == "element":
        at = (0, 0, p.seqlen_q - 1)
        out[at][0] += e * out[at].square().mean().sqrt()
    out = out.to(dtype)
    lse = (top + total.log())[..., 0]
    found = {"out": out, "lse": lse.masked_fill(empty[..., 0], -math.inf)}
    if fault in FORWARD:  # gradients are those of a right backward
        return found
    return found | _backward(p, given, (q, k, v, scores), found, fault, e)


def noisier(x: Tensor, p: Problem, e: float) -> Tensor:
    """With a further error, uniform within e half places of each number in the inputs' dtype."""
    if not e:
        return x
    half = torch.exp2(torch.frexp(x)[1].float() - p.format.precision - 1)
    draw = torch.rand(x.shape, generator=torch.Generator().manual_seed(7))
    return torch.where(x == 0, x, x + e * half * (2 * draw - 1))


def _one(share: Tensor, most: float) -> Tensor:
    """Where each row's heaviest key of weight `most` or less is, as booleans."""
    share = share.masked_fill(share > most, -1.0)
    largest = share.argmax(-1, keepdim=True)
    return torch.zeros_like(share, dtype=torch.bool).scatter(
        -1, largest, share.gather(-1, largest) > 0
    )


def _backward(
    p: Problem,
    given: Tensors,
    forward: tuple[Tensor, Tensor, Tensor, Tensor],
    saved: Tensors,
    fault: str,
    e: float,
) -> dict[str, Tensor]:
    q, k, v, scores = forward
    dout, dtype = given["dout"].float(), p.format.torch
    lse = saved["lse"][..., None].nan_to_num(neginf=math.inf) + e * (fault == "read_lse")
    weights = torch.exp(scores - lse)
    delta = (dout * saved["out"].float()).sum(-1, keepdim=True) * (1 + e * (fault == "delta"))
    ds = (weights * (dout @ v.mT - delta)).to(dtype).float()
    if fault == "ds_pair":
        ds = ds * ~_one(weights, e)
    ds = noisier(ds, p, e * (fault == "ds_noise"))
    dq, dk, dv = ds @ k * p.scale, ds.mT @ q * p.scale, weights.to(dtype).float().mT @ dout
    by_head = p.batch, p.heads_kv, p.group
    dk, dv = (x.view(*by_head, *x.shape[2:]).sum(2) for x in (dk, dv))
    found = zip(GRADIENTS, (dq, dk, dv), strict=True)
    return {name: (x * (1 + e * (fault == name))).to(dtype) for name, x in found}


def asked(rival: Rival, dtype: str) -> list[Asked]:
    """The first _PROBLEMS of a rival, in that dtype, of which it accepts the right kernel."""
    found: list[Asked] = []
    for number, name in enumerate(rival.problems):
        p = Problem.parse(name)
        if p.format.itemsize == 1 or p.score_mod is not None or len(found) == _PROBLEMS:
            continue
        p = p.but(dtype=dtype)
        given = rival.fill(p, torch.Generator().manual_seed(number))
        low = {} if rival.low is None else rival.low(p, given)
        one = Asked(p, given, _eager(p, given, torch.float64), low)
        if accepted(rival, one, emulated(p, given)):
            found.append(one)
    return found


def accepted(rival: Rival, one: Asked, got: Tensors) -> bool:
    """Whether the rule accepts all tensors of `got` that it compares."""
    names = ("out", *(("lse",) if rival.lse else ()), *GRADIENTS)
    return all(rival.accepts(one, name, got[name]) for name in names if name in got)


def strength(rival: Rival, problems: list[Asked], fault: str) -> float | None:
    """The smallest e that is caught under both signs, within a tenth; None if none up to 1
    (of NOISE up to its largest) is."""
    signs = (1,) if fault in ONE_SIGN else (1, -1)

    def caught(e: float) -> bool:
        return all(
            any(
                not accepted(rival, one, emulated(one.problem, one.given, fault, sign * e))
                for one in problems
            )
            for sign in signs
        )

    low, high = -14.0, NOISE.get(fault, 0.0)
    if not problems or not caught(2.0**high):
        return None
    while high - low > 0.14:
        middle = (low + high) / 2
        low, high = (low, middle) if caught(2.0**middle) else (middle, high)
    return float(f"{2.0**high:.1e}")


def measured() -> dict[str, dict[str, dict[str, float | None]]]:
    """By rule, dtype and class."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for rival in RIVALS:
        for dtype in DTYPES:
            problems = asked(rival, dtype)
            found.setdefault(rival.name, {})[dtype] = {
                fault: strength(rival, problems, fault) for fault in (*FORWARD, *BACKWARD)
            }
    return found


def main() -> None:
    """Measure all, and write the module."""
    torch.set_num_threads(1)
    text = MODULE.read_text(encoding="utf-8")
    head, mark, _ = text.partition("RIVALS: ")
    lines = [f"{mark}Mapping[str, Mapping[str, Mapping[str, float | None]]] = {{"]
    for rule, by_dtype in measured().items():
        lines.append(f'    "{rule}": {{')
        for dtype, by_fault in by_dtype.items():
            lines.append(f'        "{dtype}": {{')
            lines += [f'            "{fault}": {e},' for fault, e in by_fault.items()]
            lines.append("        },")
        lines.append("    },")
    MODULE.write_text(head + "\n".join([*lines, "}", ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
