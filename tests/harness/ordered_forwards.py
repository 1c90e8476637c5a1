"""Honest forwards that declare the order of their blocks of keys, and how much of what is known of
their O they need."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.harness.declared import flat_numerics
from tests.harness.drawn_inputs import drawn
from tests.harness.emulation import Kernel, Luck, emulate
from verify.arithmetic.dtypes import DType
from verify.judging.comparison import compare
from verify.judging.lattice import acceptable, explained
from verify.judging.truth import Truth, compute_truth
from verify.problem import Problem
from verify.problem.inputs import dequantised
from verify.tolerance.forward import resolve
from verify.tolerance.intervals import Interval
from verify.variant import Config

HALVES = ("float16", "bfloat16")
TILE = 16


def ordered(name: str, order: str = "ascending", **changes: object) -> Kernel:
    """An emulated kernel of that order; names of `Numerics` fields and of `Kernel` change it."""
    kernel = Kernel(name, flat_numerics(block_n=32, key_order=order), tile=TILE)
    return kernel.but(**changes)


HONEST = (
    ordered("ascending, sm_90"),
    ordered("descending, sm_90", "descending"),
    ordered("whole blocks first, sm_90", "whole_first", block_n=16),
    ordered("ascending, sm_80", arch="sm_80", block_n=16, scale_roundings=3),
    ordered("ascending, sm_70", arch="sm_70", dtypes=("float16",)),
    ordered("fused, as FlashAttention-2", "descending", style="fused", scale_roundings=3),
    ordered("fused, whole blocks first", "whole_first", style="fused", block_n=16),
    ordered("errors where V is", errors="V"),
    ordered("errors up", "descending", errors="up"),
    ordered("errors down", errors="down", row_sum_lanes=4, row_sum_apart=True),
    ordered("errors at random", "descending", errors="random"),
    ordered("one block", block_n=0),
    ordered("lagging maximum", maximum_lag=8.0, block_n=16),
    ordered("lagging a little", "descending", maximum_lag=0.5, block_n=16, style="fused"),
    ordered("lagging, whole blocks first", "whole_first", maximum_lag=4.0, block_n=8),
    ordered("tanh.approx", softcap_tanh="tanh.approx"),
    ordered("__expf", exp="__expf"),
    ordered("prescaled q", prescale="q"),
    ordered("cubic exp2, other rescales", exp="exp2_poly3", rescale_exp="ex2.approx"),
    ordered("scores in 16 bits", scores="input", scale_roundings=3),
    ordered("sums in fp16", accumulator="float16", dtypes=("float16",)),
    ordered("CPU, fexp_u20", exp="fexp_u20", arch="cpu", block_n=64),
    ordered("fp32 P", probability="float32"),
    ordered("fp16 P of bf16 inputs", probability="float16", dtypes=("bfloat16",)),
    ordered("bf16 P of fp16 inputs", probability="bfloat16", values="input", dtypes=("float16",)),
    ordered("normalised P", normalised=True, exp="vexp", block_n=0, arch="cpu", style="eager"),
    ordered(
        "normalised P, sm_90", "descending", normalised=True, exp="vexp", block_n=0, style="eager"
    ),
    ordered("sum of rounded P", row_sum_of="rounded"),
    ordered("merged halves", split_keys=True, style="split"),
    ordered("three parts", split_keys=True, style="split", parts=3, block_n=16),
    ordered("parts, descending", "descending", split_keys=True, style="split", parts=2),
    ordered(
        "parts, whole first", "whole_first", split_keys=True, style="split", parts=2, block_n=8
    ),
    ordered("parts that lag", split_keys=True, style="split", parts=2, block_n=8, maximum_lag=8.0),
    ordered("parts in 16 bits", split_keys="input", style="split", parts=2, block_n=16),
    ordered("8-bit P", promotion=32, probability_scale=256.0, dtypes=("float8_e4m3fn",)),
    ordered("operands that are normalised", normalises=True, dtypes=("float16",)),
)
SHAPES = (
    "sq=33,skv=70,d=32",
    "b=2,hq=4,hkv=2,sq=9,skv=40,d=16,mask=causal",
    "sq=40,skv=129,d=64,mask=window.20.0",
    "sq=5,skv=3,d=16",
    "sq=16,skv=48,d=64,scale=-0.125",
    "sq=9,skv=33,d=24,dv=40,softcap=20.0",
    "sq=40,skv=100,d=16,mask=window.9.30",
    "sq=9,skv=33,d=16,scale=4.0,softcap=1.0",
    "b=2,sq=50,skv=50,d=16,mask=documents.30_50",
    "sq=4,skv=40,d=16,scale=0.0",
    "sq=12,skv=30,d=16,mask=dense.50.3",
    "sq=12,skv=7,d=16,mask=causal",
    "sq=33,skv=95,d=32,mask=prefix.20",
    "sq=2,skv=300,d=128,scale=0.01",
    "sq=40,skv=96,d=64,mask=causal",
    "sq=1,skv=1,d=1",
    "sq=5,skv=0,d=16",
    "sq=4,skv=200,d=64,scale=1.0",
)


def mixed(made: random.Random) -> Kernel:
    """A kernel of declarations that are drawn at random, each by itself."""
    style = made.choice(("online", "online", "fused", "split"))
    changes: dict[str, object] = {
        "style": style,
        "arch": made.choice(("sm_90", "sm_80", "cpu")),
        "errors": made.choice(("O", "V", "up", "down", "random")),
        "tile": made.choice((8, 16, 32)),
        "block_n": made.choice((0, 8, 16, 32, 64)),
        "exp": made.choice(("ex2.approx", "exp2_poly3", "fexp_u20", "__expf", "vexp")),
        "rescale_exp": made.choice((None, "ex2.approx", "exp2_poly3")),
        "maximum_lag": made.choice((0.0, 0.0, 0.3, 2.0, 8.0)),
        "lanes": made.choice((1, 1, 4)),
        "apart": made.random() < 0.5,
    }
    if style == "split":
        changes["split_keys"] = made.choice((True, True, "input"))
        changes["parts"] = made.choice((0, 1, 2, 3, 5))
    if style != "fused":
        changes["prescale"] = made.choice(("none",) * 6 + ("q",))
        changes["scores"] = made.choice(("float32",) * 6 + ("input",))
        changes["softcap_tanh"] = made.choice(("tanhf", "tanh.approx"))
    order = made.choice(("ascending", "descending", "whole_first", "whole_first"))
    return ordered("mixed", order, **changes)


@dataclass(frozen=True, eq=False)
class Judged:
    """What the elements of one O need: of the bound, and of what is known of O, (batch, heads_q,
    seqlen_q, head_dim_v), 0 in rows without a key.  truth: with an interval; output: O's format."""

    bounded: Tensor
    known: Tensor
    truth: Truth
    output: DType

    @property
    def span(self) -> Interval:
        assert self.truth.interval is not None
        return self.truth.interval

    @property
    def worst(self) -> float:
        """The largest part of what is known that an element needs."""
        return float(self.known.max()) if self.known.numel() else 0.0

    @property
    def single(self) -> float:
        """The share of elements for which one stored number alone is accepted."""
        count = acceptable(self.span.middle, self.span.reach, self.output)
        asked = (count > 0) & ~self.truth.empty[..., None]
        return int(((count == 1) & asked).sum()) / max(int(asked.sum()), 1)

    def sharper(self, places: float = 0.5) -> float:
        """The median of the bound over the known interval, so many places added for its last
        rounding."""
        place = 2 * self.output.unit_roundoff * self.span.middle.abs()
        far = (self.span.middle - self.truth.out).abs() + self.span.reach
        return float((self.truth.out_bound / (far + places * place)).nanmedian())


def problem_of(text: str, dtype: str, distribution: str = "normal", seed: int = 0) -> Problem:
    """A problem of that shape and dtype, for an O in 16 bits."""
    eight = ",out=bfloat16" if dtype.startswith("float8") else ""
    return Problem.parse(f"{text},dtype={dtype}{eight},dist={distribution},seed={seed}")


def truth_of(problem: Problem, declared: Kernel) -> Truth:
    """The truth with the bounds of an emulated kernel's declaration."""
    arithmetic = resolve(declared.numerics, Config(block_m=declared.tile), problem, declared.arch)
    return compute_truth(problem, dequantised(problem, drawn(problem)), [arithmetic])


def judged(
    problem: Problem, kernel: Kernel, luck: Luck = Luck.NEAREST, declared: Kernel | None = None
) -> Judged:
    """An emulated kernel's O, judged by its own declaration or another's."""
    truth = truth_of(problem, declared or kernel)
    assert truth.interval is not None
    out = emulate(problem, kernel, luck).out
    live = ~truth.empty[..., None]
    bounded = compare(out, truth.out, truth.out_bound, problem.format_out).ratio
    known = explained(out, truth.interval.middle, truth.interval.reach, problem.format_out)
    return Judged(
        torch.where(live, bounded, 0.0), torch.where(live, known, 0.0), truth, problem.format_out
    )


def suits(kernel: Kernel, shape: str) -> bool:
    """Whether an emulated kernel computes that shape: the fused style takes the maximum before it
    scales, so it is for positive scales, and has no softcap."""
    return kernel.style != "fused" or not any(
        part in shape for part in ("scale=-", "scale=0.0", "softcap")
    )
