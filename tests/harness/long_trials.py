"""Long problems, and trials of kernels that answer them in fp64 without a launch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from references import attention
from references.masks import Mask
from tests.harness.fake_trials import OK, trial_of
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.problem import Problem

WIDE = Problem(
    heads_q=2,
    heads_kv=1,
    seqlen_q=6,
    seqlen_kv=(1 << 16) + 65,
    head_dim=24,
    dtype="float16",
    seed=5,
)
TALL = Problem(
    heads_q=2,
    heads_kv=1,
    seqlen_q=(1 << 16) + 140,
    seqlen_kv=65,
    head_dim=16,
    dtype="float16",
    seed=5,
)

Answer = tuple[Tensor, Tensor]  # O and LSE, fp64
Kernel = Callable[[Problem, Tensor, Tensor, Tensor], Answer]


def right(p: Problem, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Answer:
    """fp64 attention, under another mask where one is given."""
    found = attention.forward(q, k, v, attention.Attention(mask or p.mask, p.scale, p.score_mod))
    return found.out, found.lse


def tried(problem: Problem, kernel: Kernel = right) -> Trial:
    """A trial of that kernel."""
    trial = trial_of(problem)
    out, lse = kernel(problem, *(x.double() for x in trial.expanded))
    trial.launches["first"] = Launch(
        OK, "nan", {"out": out.to(problem.format_out.torch), "lse": lse.float()}
    )
    return trial
