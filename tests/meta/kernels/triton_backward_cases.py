"""Cases for the Triton backward; `python -m tests.meta.kernels.triton_backward_cases` runs CASES
where Triton interprets.

A case runs the forward and twice the backward, over differently poisoned outputs, and judges the
gradients by their bounds. Gaps between the rows of inputs hold NaN, as do the rows and keys that
the mask hides entirely, in q, k, v and dout.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.triton import flash_backward, flash_forward
from references.masks import (
    Causal,
    Documents,
    Full,
    Lengths,
    Mask,
    Prefix,
    Window,
    intersect,
    parse_mask,
)
from verify.cell.triton_interpreter import repair
from verify.problem import Problem
from verify.tolerance.backward import gradient_truth, resolve
from verify.variant import AttentionArgs, Gradients, Saved

NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """A problem, a config's number, a variant, and how the tensors lie: "plain", "packed" (seqlen
    before heads) or "odd" (unaligned)."""

    problem: Problem
    config: int = 0
    variant: str = flash_backward.VARIANT.name
    layouts: str = "plain"
    seed: int = 0

    @property
    def name(self) -> str:
        p = self.problem
        shape = (
            f"b{p.batch} h{p.heads_q}x{p.heads_kv} s{p.seqlen_q}x{p.seqlen_kv}"
            f" d{p.head_dim}x{p.head_dim_v}"
        )
        return (
            f"{p.dtype} {shape} {p.mask.name} scale {p.scale:.3g} config {self.config}"
            f" {self.layouts} {self.variant}"
        )


@dataclass(frozen=True)
class Outcome:
    """ratios: the greatest error over its bound, of dq, dk and dv; relative: over the output's unit
    roundoff and the greatest magnitude of that gradient.  failures: what else is wrong."""

    name: str
    ratios: tuple[float, float, float]
    relative: tuple[float, float, float]
    failures: tuple[str, ...]


def run(case: Case, device: str) -> Outcome:
    """Run the forward and the backward there and judge them."""
    p, generator = case.problem, torch.Generator().manual_seed(case.seed)
    shapes = {
        "q": (p.batch, p.heads_q, p.seqlen_q, p.head_dim),
        "k": (p.batch, p.heads_kv, p.seqlen_kv, p.head_dim),
    }
    shapes |= {"v": (*shapes["k"][:3], p.head_dim_v), "dout": (*shapes["q"][:3], p.head_dim_v)}
    dtype = getattr(torch, p.dtype)
    clean = {
        name: torch.randn(shape, generator=generator).to(dtype).to(device)
        for name, shape in shapes.items()
    }
    seen = p.mask.dense(p.batch, 1, p.seqlen_q, p.seqlen_kv, device)[:, 0]
    hidden = {"q": ~seen.any(2), "k": ~seen.any(1)}
    hidden |= {"v": hidden["k"], "dout": hidden["q"]}
    given = {
        name: _lay(case, x.masked_fill(hidden[name][:, None, :, None], math.nan))
        for name, x in clean.items()
    }
    variant = next(each for each in flash_backward.VARIANTS if each.name == case.variant)
    config, saving = flash_backward.CONFIGS[case.config], flash_forward.VARIANT.configs[0]
    q, k, v, dout = given.values()
    args = AttentionArgs(
        q=q, k=k, v=v, mask=p.mask, softmax_scale=p.scale, score_mod=None, config=saving
    )
    saved = Saved(
        _lay(case, torch.full_like(clean["dout"], math.nan)),
        torch.full(shapes["q"][:3], math.nan, device=device),
    )
    flash_forward.forward(args, saved.out, saved.lse, {})
    results = [
        {
            name: _lay(case, torch.full_like(clean[x], poison))
            for name, x in zip(NAMES, "qkv", strict=True)
        }
        for poison in (math.nan, 7.0)
    ]
    failures = []
    for result in results:
        assert variant.backward is not None
        assert variant.backward_workspace is not None
        workspace = {
            name: torch.full(shape, math.nan, dtype=getattr(torch, dtype), device=device)
            for name, (shape, dtype) in variant.backward_workspace(args).items()
        }
        variant.backward(replace(args, config=config), saved, dout, Gradients(**result), workspace)
        failures += [f"wrote outside {name}" for name, x in result.items() if _gaps_changed(x)]
    failures += [
        f"{name} does not repeat, or is not written"
        for name in NAMES
        if not _same(results[0][name], results[1][name])
    ]
    assert variant.gradients is not None
    arithmetic = resolve(variant.gradients, config, p, _arch(device))
    truth = gradient_truth(p, *clean.values(), saved.out.double(), saved.lse.double(), arithmetic)
    ratios, relative = [], []
    for name in NAMES:
        exact, bound, found = (
            getattr(truth, name),
            getattr(truth, f"{name}_bound"),
            results[0][name].double(),
        )
        error = (found - exact).abs().nan_to_num(nan=math.inf)
        wrong = error > bound
        ratio = torch.where(error == 0, 0.0, error / bound)
        ratios.append(float(ratio.amax()) if ratio.numel() else 0.0)
        size = float(exact.abs().amax()) if exact.numel() else 0.0
        relative.append(float(error.amax()) / (size * torch.finfo(dtype).eps / 2) if size else 0.0)
        failures += (
            [f"{name}: {int(wrong.sum())} of {wrong.numel()} elements beyond their bound"]
            if wrong.any()
            else []
        )
    return Outcome(case.name, tuple(ratios), tuple(relative), tuple(failures))


def _lay(case: Case, x: Tensor) -> Tensor:
    """A copy of x in the case's layout, with NaN between what is x's."""
    batch, heads, seqlen, dim = x.shape
    match case.layouts:
        case "plain":
            view = x.new_full((batch, heads, seqlen + 1, dim), math.nan)[:, :, :seqlen]
        case "packed":
            view = x.new_full((batch, seqlen, heads + 1, dim), math.nan)[:, :, :heads].transpose(
                1, 2
            )
        case "odd":
            view = x.new_full((heads, batch, seqlen, dim + 3), math.nan)[
                ..., 1 : dim + 1
            ].transpose(0, 1)
        case _:
            raise ValueError(case.layouts)
    return view.copy_(x)


def _gaps_changed(view: Tensor) -> bool:
    whole = view._base
    assert whole is not None
    return int(whole.isnan().sum() - view.isnan().sum()) != whole.numel() - view.numel()


def _same(a: Tensor, b: Tensor) -> bool:
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def _arch(device: str) -> str:
    return "cpu" if device == "cpu" else "sm_{}{}".format(*torch.cuda.get_device_capability())


def draw(
    seed: int, longest: int = 150, dims: tuple[int, ...] = (16, 24, 32, 40, 64, 80, 128)
) -> Case:
    """A case drawn from everything that the backward supports."""
    r = random.Random(seed)
    heads_kv, group = r.choice(((1, 1), (1, 2), (2, 1), (1, 3)))
    lengths = [
        r.choice((0, 1, 16, 64, 128, *(r.randint(1, longest) for _ in range(20)))) for _ in "qk"
    ]
    head_dim = r.choice(dims)
    batch = r.choice((1, 1, 2))
    problem = Problem(
        batch=batch,
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        seqlen_q=lengths[0],
        seqlen_kv=lengths[0] if r.random() < 0.3 else lengths[1],
        head_dim=head_dim,
        head_dim_v=r.choice(dims) if r.random() < 0.3 else head_dim,
        dtype=r.choice(("float16", "bfloat16", "float32")),
        softmax_scale=r.choice((None, None, None, -(head_dim**-0.5), 0.0, 0.9)),
    )
    mask = _mask(r, problem)
    if r.random() < 0.2:
        mask = intersect(mask, _mask(r, problem))
    return Case(
        replace(problem, mask=mask),
        r.randrange(2),
        r.choice(("plain", "plain", "packed", "odd")),
        seed,
    )


def _mask(r: random.Random, p: Problem) -> Mask:
    def some(most: int) -> int:
        return r.choice((0, r.randint(0, most), r.randint(0, most)))

    lengths = [
        tuple(r.choice((0, n, r.randint(0, n))) for _ in range(p.batch))
        for n in (p.seqlen_q, p.seqlen_kv)
    ]
    left, right = (r.choice((None, some(p.seqlen_kv))) for _ in "lr")
    documents = tuple(r.randint(0, 60) for _ in range(r.randint(1, 4)))
    choices = (
        Full(),
        Causal(),
        Causal("tl"),
        Window(left, right, r.choice(("br", "tl"))),
        Lengths(*lengths),
        Documents(documents),
    )
    return r.choice((*choices, Prefix(some(p.seqlen_kv))))


def _case(
    dtype: str, mask: str, lengths: tuple[int, int], dims: tuple[int, int] = (64, 64), **others: Any
) -> Case:
    heads, scale = others.pop("heads", (1, 1)), others.pop("scale", None)
    problem = Problem(
        batch=others.pop("batch", 1),
        heads_q=heads[0],
        heads_kv=heads[1],
        seqlen_q=lengths[0],
        seqlen_kv=lengths[1],
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=dtype,
        mask=parse_mask(mask),
        softmax_scale=scale,
    )
    return Case(problem, **others)


# Every kind of mask, dtype, config and layout; several blocks of keys and of rows; ragged, empty
# and zero lengths.
CASES = (
    _case("float16", "full", (150, 140), config=0, layouts="packed"),
    _case("bfloat16", "full", (70, 90), (128, 64), config=1, heads=(3, 1)),
    _case("float32", "full", (40, 70), (40, 24), config=1, layouts="odd", scale=-0.4),
    _case("bfloat16", "causal", (150, 150), config=2),
    _case("float16", "causal", (100, 150), (32, 80), config=1, layouts="odd", heads=(2, 1)),
    _case("float16", "causal", (150, 60), config=1),  # the first rows see nothing
    _case("float32", "causal.tl", (150, 90), config=0, layouts="packed"),
    _case("bfloat16", "window.30.5", (140, 150), (16, 16), config=1),
    _case("float16", "window.20.inf", (150, 100), (128, 80), config=2, scale=0.9),
    _case("float32", "causal+window.17.0.tl", (90, 120), config=1),
    _case("float16", "lengths.97_0_60.150_40_0", (130, 150), batch=3, config=0),
    _case(
        "bfloat16",
        "causal+lengths.70_90.100_33",
        (90, 100),
        batch=2,
        heads=(4, 2),
        config=1,
        layouts="packed",
    ),
    _case("bfloat16", "documents.40_0_70_20", (150, 150), config=2, layouts="odd"),
    _case("float16", "causal+documents.50_30", (60, 130), config=1),
    _case("float32", "prefix.50", (60, 100), (128, 128), config=0),
    _case("bfloat16", "prefix.30", (150, 100), config=1, scale=0.0),
    _case("float16", "full", (30, 50), (256, 192), config=1),
    _case("bfloat16", "causal", (50, 40), (256, 256), config=0),
    _case("float16", "full", (1, 1), config=0),
    _case("float16", "full", (0, 70), config=0),
    _case("bfloat16", "lengths.0.0", (0, 70), config=1),
    _case("float32", "full", (70, 0), config=1),
    _case("float16", "causal+lengths.40.0", (70, 0), config=0, layouts="odd"),
    *(
        _case(dtype, mask, lengths, variant=f"triton-flash-backward-{mode}", config=1, **others)
        for mode in ("atomic", "prescaled")
        for dtype, mask, lengths, others in (
            ("float16", "causal", (100, 150), {"layouts": "odd", "heads": (2, 1)}),
            ("bfloat16", "causal+lengths.70_90.100_33", (90, 100), {"batch": 2}),
            ("float32", "full", (40, 70), {"scale": -0.4}),
            ("float16", "window.20.inf", (150, 0), {}),
        )
    ),
)


def main() -> None:
    """Print the outcomes of CASES on the CPU, one a line of JSON."""
    repair()
    torch.set_num_threads(1)
    for case in CASES:
        print(json.dumps(vars(run(case, "cpu"))), flush=True)


if __name__ == "__main__":
    main()
