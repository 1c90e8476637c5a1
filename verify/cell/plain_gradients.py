"""The gradients of a plain function, by autograd: a variant of their own, with a backward alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from references.masks import Full
from verify.cell.breach import Breach
from verify.variant import (
    AttentionArgs,
    Config,
    Contract,
    Declaration,
    GradientNumerics,
    GradientProducts,
    Gradients,
    GradientSoftmax,
    GradientSums,
    Saved,
    ScoreGradient,
    Support,
    Variant,
    Workspace,
)
from verify.variant.support import up

SUFFIX = "-gradients"
"""Behind the name of a function, in that of the variant of its gradients."""

DTYPES = ("bfloat16", "float32")

_UNJUDGED = {
    "float16": "its range is so short that a bound of an undeclared backward would have to know"
    " where that multiplies by the scale; judge bfloat16 too, or declare the backward",
}

# What torch says of the backward of an operator that was given none.
_UNREGISTERED = "no autograd formula was registered"

# The weakest honest arithmetic that can be declared; the judge allows an unknown one more
# (docs/tolerance-backward.md, An unknown backward).
WEAKEST = GradientNumerics(
    products=GradientProducts(prescale="sqrt"),
    softmax=GradientSoftmax(
        source="own", exp="exp_u20", softcap_tanh="tanh.approx", scale_roundings=3
    ),
    score_gradient=ScoreGradient(of="rounded", delta="input"),
    sums=GradientSums(
        block_m=16,
        block_n=16,
        group="cast",
        atomics=("dq", "dk", "dv"),
        atomics_dtype="input",
        roundings=6,
    ),
)


def variant(
    forward: Variant, function: Callable[[AttentionArgs, Sequence[Tensor]], Any], layout: str
) -> Variant:
    """The gradients of a function whose forward is that variant, as a variant.

    function: (args, [q, k, v] in its layout) -> O, or O and more.

    It is unavailable, with the reason, if no result of the function requires a gradient, or none of
    its dtypes is one of DTYPES.
    """
    dtypes = tuple(dtype for dtype in DTYPES if dtype in forward.support.dtypes)
    by = forward.numerics.products.float32_products
    products = replace(WEAKEST.products, float32_products=by)

    def call(args: AttentionArgs) -> tuple[list[Tensor], Tensor]:
        inputs = [x.detach().clone() for x in (args.q, args.k, args.v)]
        if layout == "bshd":
            inputs = [x.transpose(1, 2).contiguous() for x in inputs]
        inputs = [x.requires_grad_() for x in inputs]
        with torch.enable_grad():
            result = function(args, inputs)
        return inputs, result[0] if isinstance(result, tuple | list) and result else result

    def backward(
        args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, workspace: Workspace
    ) -> None:
        inputs, out = call(args)
        upstream = dout.transpose(1, 2).contiguous() if layout == "bshd" else dout
        if not isinstance(out, Tensor) or out.shape != upstream.shape:
            raise Breach("returned no tensor of the output's shape")
        if not out.requires_grad:
            raise Breach("its result does not require a gradient, though it did for another input")
        found: list[Tensor] = []
        for name, gradient in zip("qkv", _differentiated(out, inputs, upstream), strict=True):
            if gradient is None:
                raise Breach(f"its result does not depend on {name}: no gradient")
            found.append(gradient.transpose(1, 2) if layout == "bshd" else gradient)
        gradients.copy_(*found)

    def available() -> str | None:
        if not dtypes:
            return f"gradients of a plain function are judged in {' and '.join(DTYPES)} only"
        return _undifferentiable(call, dtypes[-1], forward.support)

    return Variant(
        name=f"{forward.name}{SUFFIX}",
        family=forward.family,
        backward=backward,
        support=replace(forward.support, dtypes=dtypes or forward.support.dtypes),
        numerics=forward.numerics,
        gradients=replace(WEAKEST, products=products),
        contract=Contract(lse=None, deterministic=False, deterministic_backward=False),
        allocates_outputs=True,
        available=available,
    )


def unjudged(declarations: Sequence[Declaration]) -> Iterator[tuple[str, str, str]]:
    """(variant of gradients, dtype of its forward, why no gradient is judged in that), for the
    plain functions among these that have both."""
    by_ref = {declaration.ref: declaration for declaration in declarations}
    for declaration in declarations:
        forward = by_ref.get(declaration.ref.removesuffix(SUFFIX))
        if not declaration.undeclared or forward is None or declaration.unavailable is not None:
            continue
        for dtype in forward.support.dtypes:
            if dtype not in declaration.support.dtypes:
                why = _UNJUDGED.get(dtype, "no bound of gradients is derived for it")
                yield declaration.ref, dtype, f"gradients are not judged: {why}"


class _Upstream(torch.autograd.Function):
    """A scalar of a result; the backward of the result gets the given gradient as it is."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, upstream: Tensor) -> Tensor:
        ctx.upstream = upstream
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.upstream, None


def _differentiated(
    out: Tensor, inputs: Sequence[Tensor], upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad(out, inputs, upstream, allow_unused=True), without its import of sympy:
    half a second in each kernel process, or three where nothing keeps modules compiled."""
    scalar = _Upstream.apply(out, upstream)  # type: ignore[no-untyped-call]
    return torch.autograd.grad(scalar, inputs, allow_unused=True)


def _undifferentiable(
    call: Callable[[AttentionArgs], tuple[list[Tensor], Tensor]],
    dtype: str,
    support: Support,
) -> str | None:
    """Why autograd cannot differentiate the function, or None: tried on 16 tokens, or as many as
    the support has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    most = 16 if support.max_seqlen is None else min(16, support.max_seqlen)
    length = up(max(most, support.min_seqlen), support.common_multiple)
    heads = (2 if support.grouped_heads == "only" else 1, 1, 1)
    dim = support.head_dims[0]
    q, k, v = (
        torch.ones((1, count, length, dim), dtype=getattr(torch, dtype), device=device)
        for count in heads
    )
    args = AttentionArgs(q, k, v, Full(), dim**-0.5, None, Config())
    try:
        inputs, out = call(args)
    except Exception as error:
        return f"gradients cannot be tried: {type(error).__name__}: {str(error)[:200]}"
    if not isinstance(out, Tensor) or not out.requires_grad:
        return "its result requires no gradient: autograd does not know the function"
    try:
        _differentiated(out, inputs, torch.ones_like(out))
    except Exception as error:  # any other error is a verdict
        if isinstance(error, NotImplementedError) or _UNREGISTERED in str(error):
            return f"it has no backward: {str(error).splitlines()[0][:200]}"
    return None
