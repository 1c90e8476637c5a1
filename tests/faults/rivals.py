"""What other suites' checks say of a faulty kernel, on inputs of their own kind.

Each rival is a rule and the problems that it is asked on, both from its public sources (read in
2026).  Lengths, batches and heads are scaled down to what Triton's interpreter runs in a second;
nothing else is.  A rival that tests gradients also runs the shipped backward behind a faulty Triton
forward, since a wrong LSE shows there.

- FlashAttention, tests/test_flash_attn.py and hopper/test_flash_attn.py: N(0, 1), (batch, seqlen,
  heads, head_dim) tensors; max|x - ref| <= 2 max|pt - ref| + 2 max|(ref + 0.3 - 0.3) - ref| for O,
  with 3 for gradients, where pt is eager torch in the inputs' dtype with the scale applied to K.
  The LSE is not compared.  8-bit inputs with descales: pt rounds P to 8 bits.
- PyTorch, test/test_transformers.py, test_flash_attention_vs_math_ref_grads: U[0, 1); max|x - ref|
  <= max(1e-5, f max|lp - ref|) with f = 4, 180, 16, 4 for O, dQ, dK, dV, where lp is the math
  backend in the inputs' dtype.
- cuDNN frontend, test/python/sdpa/fp16.py: integers in [-2, 2], 80 % of them 0, and rows with
  scores near -200; random strides, lengths and windows; margins and outputs filled with NaN; |x -
  ref| <= 2e-2 + 2e-2 |ref| for O, LSE and gradients, 7e-2 for dK and dV in bf16.  Its tests of
  8-bit inputs are left out.
- Triton, python/tutorials/06-fused-attention.py, test_op: N(0, 1/4), one causal shape, scale 0.5;
  |x - ref| <= 1e-2, and 3 for 8-bit inputs, which are e5m2 there and e4m3 here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from references.score_mods import cap_of
from tests.faults.fault import TRITON_FORWARD, Fault
from tests.faults.stand import Stand, finished
from verify.cell.arena import bits
from verify.problem import Problem
from verify.variant import Declaration

Tensors = Mapping[str, Tensor]
GRADIENTS = ("dq", "dk", "dv")


# Inputs.


def _shaped(problem: Problem, draw: Callable[[tuple[int, ...]], Tensor]) -> dict[str, Tensor]:
    shapes = {
        "q": problem.shape_q,
        "k": problem.shape_k,
        "v": problem.shape_v,
        "dout": problem.shape_dout,
    }
    return {name: draw(shape) for name, shape in shapes.items()}


def _cast(problem: Problem, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """In the problem's dtypes."""
    dtypes = {"dout": problem.format_out.torch}
    return {
        name: tensor.to(dtypes.get(name, problem.format.torch)) for name, tensor in values.items()
    }


def _randn(problem: Problem, generator: torch.Generator) -> dict[str, Tensor]:
    values = _shaped(problem, lambda shape: torch.randn(shape, generator=generator))
    values["q"] *= cap_of(problem.score_mod) / 4 or 1.0
    found = _cast(problem, values)
    if problem.descaling != "none":
        found |= {
            f"descale_{n}": 2 * torch.rand(problem.batch, problem.heads_kv, generator=generator)
            for n in "qkv"
        }
    return found


def _rand(problem: Problem, generator: torch.Generator) -> dict[str, Tensor]:
    return _cast(problem, _shaped(problem, lambda shape: torch.rand(shape, generator=generator)))


def _narrow(problem: Problem, generator: torch.Generator) -> dict[str, Tensor]:
    values = _shaped(problem, lambda shape: 0.5 * torch.randn(shape, generator=generator))
    return _cast(problem, values | {"dout": 2 * values["dout"]})


def _integers(problem: Problem, generator: torch.Generator) -> dict[str, Tensor]:
    def sparse(shape: tuple[int, ...]) -> Tensor:
        whole = torch.randint(-2, 3, shape, generator=generator).float()
        return whole * (torch.rand(shape, generator=generator) >= 0.8)

    values = _shaped(problem, sparse)
    direction = torch.randint(0, 2, (problem.head_dim,), generator=generator) * 2.0 - 1.0
    values["k"] += 2 * direction
    size = 2.0 ** math.ceil(math.log2(max(8.0, 200 / (2 * problem.head_dim * problem.scale))))
    rows = values["q"][:, :: problem.group].clone().view(-1, problem.head_dim)
    chosen = torch.randperm(len(rows), generator=generator)[: max(1, len(rows) // 16)]
    rows[chosen] = -size * direction
    values["q"][:, :: problem.group] = rows.view(values["q"][:, :: problem.group].shape)
    return _cast(problem, values)


# References.


def _dense(problem: Problem) -> Tensor:
    return problem.mask.dense(problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_kv)


def _eager(
    problem: Problem, given: Tensors, dtype: torch.dtype, *, rounded: torch.dtype | None = None
) -> dict[str, Tensor]:
    """O, LSE and gradients by plain torch in that dtype; `rounded`: what P is rounded to on its way
    to V."""
    q, k, v = (given[name].to(dtype) for name in "qkv")
    if problem.descaling != "none":
        q, k, v = (
            x
            * given[f"descale_{n}"]
            .to(dtype)
            .repeat_interleave(x.shape[1] // problem.heads_kv, 1)[..., None, None]
            for n, x in (("q", q), ("k", k), ("v", v))
        )
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    key, value = (tensor.repeat_interleave(problem.group, 1) for tensor in leaves[1:])
    scores = leaves[0] @ (key * problem.scale).mT
    cap = cap_of(problem.score_mod)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    seen = _dense(problem)
    scores = scores.masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    out = (p if rounded is None else p.to(rounded).to(dtype)) @ value
    found = {"out": out.detach(), "lse": torch.logsumexp(scores.detach(), -1)}
    if rounded is None:
        found |= zip(
            GRADIENTS, torch.autograd.grad(out, leaves, given["dout"].to(dtype)), strict=True
        )
    return found


def _math_backend(problem: Problem, given: Tensors) -> dict[str, Tensor]:
    """O and gradients of torch's math backend in the inputs' dtype."""
    leaves = [given[name].detach().clone().requires_grad_() for name in "qkv"]
    causal = problem.mask.kind == "causal"
    with sdpa_kernel(backends=[SDPBackend.MATH]):
        out = scaled_dot_product_attention(
            leaves[0],
            leaves[1],
            leaves[2],
            is_causal=causal,
            scale=problem.scale,
            enable_gqa=problem.group > 1,
        )
    return {"out": out.detach(), **zip_gradients(out, leaves, given)}


def zip_gradients(out: Tensor, leaves: list[Tensor], given: Tensors) -> dict[str, Tensor]:
    """dq, dk and dv by autograd."""
    return dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, given["dout"]), strict=True))


# Rules: whether they accept a tensor by its name.


@dataclass(frozen=True)
class Asked:
    """One problem of a rival, its inputs and the exact result; `low`: the baseline in low
    precision, where the rule has one."""

    problem: Problem
    given: Tensors
    exact: Tensors
    low: Tensors


def _furthest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _twice_pt(asked: Asked, name: str, got: Tensor) -> bool:
    dtype = asked.problem.format_out.torch if name == "out" else asked.problem.format.torch
    ref = asked.exact[name].to(dtype)
    rounding = _furthest(ref + 0.3 - 0.3, ref)
    factor = (3 if asked.problem.score_mod else 2) if name == "out" else 3
    return _furthest(got, ref) <= factor * _furthest(asked.low[name], ref) + 2 * rounding


_FUDGE = {"out": 4.0, "dq": 180.0, "dk": 16.0, "dv": 4.0}


def _fudged(asked: Asked, name: str, got: Tensor) -> bool:
    gold = asked.exact[name]
    error, baseline = _furthest(got, gold), _furthest(asked.low[name], gold)
    return not (math.isnan(error) and not math.isnan(baseline)) and not error > max(
        1e-5, _FUDGE[name] * baseline
    )


def _two_percent(asked: Asked, name: str, got: Tensor) -> bool:
    atol = 7e-2 if name in ("dk", "dv") and asked.problem.dtype == "bfloat16" else 2e-2
    return torch.allclose(got.double(), asked.exact[name].double(), atol=atol, rtol=2e-2)


def _one_percent(asked: Asked, name: str, got: Tensor) -> bool:
    atol = 3.0 if asked.problem.format.itemsize == 1 else 1e-2
    return torch.allclose(got.double(), asked.exact[name].double(), atol=atol, rtol=0)


def _pt(problem: Problem, given: Tensors) -> Tensors:
    if problem.format.itemsize == 1:
        return _eager(problem, given, torch.bfloat16, rounded=problem.format.torch)
    return _eager(problem, given, problem.format.torch)


@dataclass(frozen=True, kw_only=True)
class Rival:
    """problems: names of what it asks; fill: their values; accepts: its rule for one tensor; low:
    its baseline, if it has one; lse: whether it looks at it; margins: whether it fills outputs with
    NaN and looks at what lies around them."""

    name: str
    problems: tuple[str, ...]
    fill: Callable[[Problem, torch.Generator], dict[str, Tensor]]
    accepts: Callable[[Asked, str, Tensor], bool]
    low: Callable[[Problem, Tensors], Tensors] | None = None
    lse: bool = False
    margins: bool = False

    def asked(self, declaration: Declaration) -> Iterator[Asked]:
        """Its problems that a kernel supports, with inputs and references."""
        for number, name in enumerate(self.problems):
            problem = Problem.parse(name)
            if declaration.support.refusal(problem) is not None:
                continue
            given = self.fill(problem, torch.Generator().manual_seed(number))
            yield Asked(
                problem,
                given,
                _eager(problem, given, torch.float64),
                {} if self.low is None else self.low(problem, given),
            )


_BSHD = ",lq=bshd,lk=bshd,lv=bshd,lo=bshd,ldo=bshd"
_PITCHED = ",lq=bshd.p8,lk=bhsd.p8,lv=sbhd,lo=bshd.p8,ldo=sbhd.p8"

RIVALS = (
    Rival(
        name="FlashAttention 2x",
        problems=(
            f"hq=1,hkv=1,sq=113,skv=203,d=64,dtype=float16{_BSHD}",
            f"hq=4,hkv=2,sq=113,skv=211,d=40,dtype=bfloat16,mask=causal{_BSHD}",
            f"hq=2,hkv=1,sq=108,skv=256,d=128,dtype=float16,mask=window.37.21{_BSHD}",
            f"b=2,hq=1,hkv=1,sq=128,skv=217,d=64,dtype=bfloat16,mask=causal{_BSHD}",
            f"hq=2,hkv=2,sq=1,skv=239,d=64,dtype=float16,mask=causal{_BSHD}",
            f"hq=2,hkv=2,sq=239,skv=1,d=64,dtype=float16,mask=causal{_BSHD}",
            f"hq=1,hkv=1,sq=256,skv=128,d=64,dtype=float16,mask=causal{_BSHD}",
            f"hq=1,hkv=1,sq=3,skv=399,d=59,dtype=float16,mask=causal{_BSHD}",
            f"b=2,hq=2,hkv=1,sq=128,skv=217,d=96,dtype=float16,mask=lengths.115_128.203_217{_BSHD}",
            f"hq=1,hkv=1,sq=113,skv=203,d=64,dtype=float16,softcap=50.0{_BSHD}",
            f"hq=4,hkv=2,sq=113,skv=203,d=64,dtype=float8_e4m3fn,descale=head{_BSHD}",
            f"b=2,hq=4,hkv=2,sq=128,skv=217,d=128,dtype=float8_e4m3fn,descale=head,mask=causal{_BSHD}",
        ),
        fill=_randn,
        accepts=_twice_pt,
        low=_pt,
    ),
    Rival(
        name="PyTorch SDPA",
        problems=(
            "hq=2,hkv=2,sq=143,skv=127,d=64,dtype=float16",
            f"hq=2,hkv=2,sq=4,skv=579,d=72,dtype=bfloat16,scale={1 / 72}",
            "hq=4,hkv=2,sq=143,skv=127,d=96,dtype=bfloat16",
            "b=2,hq=2,hkv=2,sq=4,skv=4,d=32,dtype=float16,mask=causal",
            "hq=1,hkv=1,sq=256,skv=256,d=128,dtype=float16,mask=causal",
            "hq=1,hkv=1,sq=143,skv=127,d=32,dtype=float32",
        ),
        fill=_rand,
        accepts=_fudged,
        low=_math_backend,
    ),
    Rival(
        name="cuDNN 2e-2",
        problems=(
            f"b=1,hq=4,hkv=2,sq=129,skv=200,d=64,dtype=float16,scale=0.125{_PITCHED}",
            f"b=1,hq=2,hkv=2,sq=100,skv=180,d=128,dv=64,dtype=bfloat16,mask=causal,scale=0.125{_BSHD}",
            f"b=1,hq=2,hkv=1,sq=120,skv=88,d=96,dtype=float16,mask=window.16.0,scale=0.125{_PITCHED}",
            "b=2,hq=2,hkv=2,sq=1,skv=333,d=64,dtype=float16,mask=lengths.1_1.333_200,scale=0.125",
            f"b=3,hq=1,hkv=1,sq=90,skv=130,d=64,dtype=float16,mask=lengths.90_40_77.130_0_51,scale=0.125{_BSHD}",
            f"hq=2,hkv=1,sq=150,skv=70,d=72,dtype=float16,mask=causal.tl,scale=0.125{_PITCHED}",
        ),
        fill=_integers,
        accepts=_two_percent,
        lse=True,
        margins=True,
    ),
    Rival(
        name="Triton tutorial 1e-2",
        problems=(
            "hq=2,hkv=2,sq=256,skv=256,d=64,dtype=float16,mask=causal,scale=0.5",
            "hq=2,hkv=2,sq=256,skv=256,d=64,dtype=float8_e4m3fn,mask=causal,scale=0.5",
        ),
        fill=_narrow,
        accepts=_one_percent,
    ),
)


@dataclass
class Gallery:
    """Asks the rivals; keeps what they ask and what the shipped kernels answered."""

    stand: Stand
    # what a rule holds against a shipped kernel: not asked
    refused: set[str] = field(default_factory=set)
    _asked: dict[tuple[str, str], list[Asked]] = field(default_factory=dict)
    _answers: dict[tuple[str, str, str], Tensors | None] = field(default_factory=dict)

    def verdict(self, rival: Rival, fault: Fault) -> str:
        """ "caught"; "passed", though a tensor that is compared differs from the shipped kernel's;
        or "not asked"."""
        shipped = self.stand.shipped(fault)
        found, touched = self._verdict(rival, shipped, self.stand.planted(fault), None)
        if found == "caught" or fault.file != TRITON_FORWARD or not touched:
            return found
        behind, _ = self._verdict(rival, *self.stand.pair(fault), touched)
        return behind if behind != "not asked" else found

    def _verdict(
        self, rival: Rival, shipped: Declaration, planted: Declaration, only: set[str] | None
    ) -> tuple[str, set[str]]:
        """That of one kernel, and the problems on which any output differs from the shipped one's;
        `only` those are asked."""
        key, touched, compared = (rival.name, shipped.ref), set(), False
        if key not in self._asked:
            self._asked[key] = list(rival.asked(shipped))
        for asked in self._asked[key]:
            name = asked.problem.name
            if only is not None and name not in only:
                continue
            if (*key, name) not in self._answers:
                before = self._answer(rival, shipped, asked)
                accepted = before is not None and self._accepts(rival, asked, before)
                self._answers[*key, name] = before if accepted else None
            before = self._answers[*key, name]
            if before is None:
                self.refused.add(f"{rival.name}: {shipped.ref}: {name}")
                continue
            after = self._answer(rival, planted, asked)
            if after is None or not self._accepts(rival, asked, after):
                return "caught", touched
            different = {n for n in before if bool((bits(after[n]) != bits(before[n])).any())}
            touched |= {name} if different else set()
            compared |= bool(different - (set() if rival.lse else {"lse"}))
        return "passed" if compared else "not asked", touched

    def _accepts(self, rival: Rival, asked: Asked, outputs: Tensors) -> bool:
        names = [name for name in outputs if name != "lse" or rival.lse]
        return all(rival.accepts(asked, name, outputs[name]) for name in names)

    def _answer(self, rival: Rival, declaration: Declaration, asked: Asked) -> Tensors | None:
        """What a kernel writes, with the LSE in the natural base; None if the run fails, or writes
        where the rival looks."""
        poison = "nan" if rival.margins else "zero"
        trial = self.stand.run(declaration, asked.problem, given=asked.given, poison=poison)
        run = finished(trial)
        if run is None or (rival.margins and run.damage is not None):
            return None
        outputs = dict(run.outputs)
        if "lse" in outputs and declaration.contract.lse == "base2":
            outputs["lse"] = outputs["lse"] * math.log(2)
        return outputs
