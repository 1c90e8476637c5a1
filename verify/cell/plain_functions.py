"""Plain functions: (q, k, v, ...) -> out or (out, lse), made into variants by what their signatures
say."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from references.masks import Causal, Full, Window
from verify.cell.layout_twins import LAYOUTS, twin
from verify.variant import (
    AttentionArgs,
    Contract,
    DeclarationError,
    Numerics,
    Output,
    Products,
    Softmax,
    Support,
    Variant,
    Workspace,
)
from verify.variant.validation import INPUT_DTYPES, MOST_HEAD_DIM, one_of, some_of, wholes


class Breach(Exception):  # noqa: N818 - a verdict, not an error of ours
    """The kernel broke the interface: wrong shape, dtype, device or type, or an output that is an
    input."""


# What is honest in eager mode and in a first kernel: everything rounded to the input's dtype, tf32
# for fp32.
WEAKEST = Numerics(
    products=Products(float32_products="tf32", prescale="q"),
    softmax=Softmax(
        scores="input", exp="exp_u20", softcap_tanh="tanh.approx", block_n=16, scale_roundings=3
    ),
    output=Output(normalised=True, normaliser="lse"),
)
_NAMES = (
    "attention",
    "forward",
    "flash_attention",
    "flash_attn_func",
    "scaled_dot_product_attention",
    "sdpa",
    "mha",
)
# What a signature may ask for, by the names that are known.
_CAUSAL = ("causal", "is_causal")
_SCALE = ("softmax_scale", "sm_scale", "scale")
_MASK = ("attn_mask", "mask")
_WINDOW = ("window_size",)
_SOFTCAP = ("softcap",)
_GROUPED = ("enable_gqa",)
_KNOWN = (*_CAUSAL, *_SCALE, *_MASK, *_WINDOW, *_SOFTCAP, *_GROUPED)

_SHAPES = {
    "bhsd": "(batch, heads, seqlen_q, head_dim_v)",
    "bshd": "(batch, seqlen_q, heads, head_dim_v)",
}
_RULES = {
    "DTYPES": some_of(*INPUT_DTYPES, least=1),
    "HEAD_DIMS": wholes(1, MOST_HEAD_DIM),
    "LAYOUT": one_of(*LAYOUTS),
}


def variants(module: Any, path: Path, interpreted: bool = False) -> tuple[Variant, ...]:
    """The variant of a file's plain function, and one for each of LAYOUTS (`twin`), which are not
    on trial.

    interpreted: Triton's interpreter runs it.

    Raises Breach if the file has no such function, DeclarationError for one that cannot be called.
    """
    function = find(module, path)
    settings = _settings(sys.modules[function.__module__])
    layout = settings.get("LAYOUT", "bhsd")
    # Only a GPU, and Triton's interpreter, multiply fp32 by tf32.
    by_tf32 = interpreted or torch.cuda.is_available()
    ieee = replace(WEAKEST, products=replace(WEAKEST.products, float32_products="ieee"))
    numerics = WEAKEST if by_tf32 else ieee
    made = {
        each: replace(_variant(function, path.stem, settings, each), numerics=numerics)
        for each in LAYOUTS
    }
    twins = (replace(variant, name=twin(path.stem, each)) for each, variant in made.items())
    return made[layout], *twins


def find(module: Any, path: Path) -> Callable[..., Any]:
    """A function named after _NAMES, or the only public function that takes (q, k, v).  Raises
    Breach."""
    functions = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and inspect.isfunction(value)
        and value.__module__ == module.__name__
    }
    for name in _NAMES:
        if name in functions:
            return functions[name]
    candidates = [
        f for f in functions.values() if _leading(f) in (["q", "k", "v"], ["query", "key", "value"])
    ]
    if len(candidates) == 1:
        return candidates[0]
    raise Breach(
        f"{path.name} declares no VARIANT and has {'no' if not candidates else 'more than one'}"
        f" function of (q, k, v): declare one, or name the function {' or '.join(_NAMES[:2])}"
    )


def _leading(function: Callable[..., Any]) -> list[str]:
    return [name.lower() for name in list(inspect.signature(function).parameters)[:3]]


def _settings(module: Any) -> dict[str, Any]:
    """What the module says beside the function: DTYPES, HEAD_DIMS, LAYOUT.  Raises
    DeclarationError."""
    found = {}
    for name, rule in _RULES.items():
        if hasattr(module, name):
            try:
                found[name] = rule(getattr(module, name))
            except ValueError as error:
                raise DeclarationError(f"{name}: {error}") from None
    return found


@dataclass(frozen=True)
class Signature:
    """What a function takes beside q, k and v: the parameter's name for each purpose, or None."""

    causal: str | None
    scale: str | None
    mask: str | None
    window: str | None
    softcap: str | None
    grouped: str | None

    @staticmethod
    def of(function: Callable[..., Any]) -> Signature:
        """Raises DeclarationError for a parameter without a default that nobody knows what to pass
        for."""
        parameters = dict(inspect.signature(function).parameters)
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        first = [name for name, each in parameters.items() if each.kind in by_position][:3]
        variadic = [each.kind for each in parameters.values()]
        if len(first) < 3 and inspect.Parameter.VAR_POSITIONAL not in variadic:
            raise DeclarationError(
                f"{function.__name__}: takes no three tensors q, k and v by position"
            )
        others = {name: each for name, each in parameters.items() if name not in first}
        loose = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        for name, each in others.items():
            if (
                name not in _KNOWN
                and each.default is inspect.Parameter.empty
                and each.kind not in loose
            ):
                raise DeclarationError(
                    f"{function.__name__}: nobody knows what to pass for {name!r}, which has no"
                    f" default (known: {', '.join(_KNOWN)})"
                )
        named = (_CAUSAL, _SCALE, _MASK, _WINDOW, _SOFTCAP, _GROUPED)
        return Signature(
            *(next((name for name in names if name in others), None) for names in named)
        )

    @property
    def masks(self) -> tuple[str, ...]:
        """Kinds of masks that can be asked for: square ones only, where both alignments agree."""
        causal = self.causal or self.mask or self.window
        return (
            "full",
            *(("causal.square",) if causal else ()),
            *(("window.square",) if self.window else ()),
        )

    def keywords(self, args: AttentionArgs) -> dict[str, Any]:
        """What is passed beside q, k and v; a window as flash-attn has it: (left, right), -1 for an
        open side."""
        found: dict[str, Any] = {}
        window = (-1, -1)
        if isinstance(args.mask, Window):
            window = _side(args.mask.left), _side(args.mask.right)
        elif isinstance(args.mask, Causal) and self.causal is not None:
            found[self.causal] = True
        elif isinstance(args.mask, Causal) and self.window is not None:
            window = (-1, 0)
        elif not isinstance(args.mask, Full) and self.mask is not None:
            shape = args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv
            found[self.mask] = args.mask.dense(*shape, device=args.q.device).contiguous()
        if self.window is not None:
            found[self.window] = window
        if self.scale is not None:
            found[self.scale] = args.softmax_scale
        if self.softcap is not None:
            found[self.softcap] = args.softcap
        if self.grouped is not None and args.heads_q != args.heads_kv:
            found[self.grouped] = True
        return found


def _side(tokens: int | None) -> int:
    return -1 if tokens is None else tokens


def _variant(
    function: Callable[..., Any], name: str, settings: Mapping[str, Any], layout: str
) -> Variant:
    """The function as a variant with the most that its signature promises.

    It is judged as eager arithmetic, the weakest that is honest: scores and probabilities rounded
    to the input's dtype.
    """
    signature = Signature.of(function)

    def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
        given = [args.q, args.k, args.v]
        if layout == "bshd":
            given = [tensor.transpose(1, 2).contiguous() for tensor in given]
        result = function(*given, **signature.keywords(args))
        if layout == "bshd":
            _check_unchanged(args, given)
        _accept(
            result, given, out.transpose(1, 2) if layout == "bshd" else out, lse, _SHAPES[layout]
        )

    return Variant(
        name=name,
        family="function",
        forward=forward,
        support=Support(
            dtypes=settings.get("DTYPES", ("float16", "bfloat16", "float32")),
            head_dims=tuple(settings.get("HEAD_DIMS", (32, 64, 128))),
            masks=signature.masks,
            grouped_heads=signature.grouped is not None,
            scales="any" if signature.scale is not None else "default",
            softcap=signature.softcap is not None,
            layouts="contiguous",
        ),
        numerics=WEAKEST,
        contract=Contract(lse="natural" if _returns_lse(function) else None),
        allocates_outputs=True,
    )


def _returns_lse(function: Callable[..., Any]) -> bool:
    """Whether the function's own text returns a pair; read, not run, because running it here would
    be no case."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return False
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return bool(returned) and all(
        isinstance(value, ast.Tuple) and len(value.elts) == 2 for value in returned
    )


def _check_unchanged(args: AttentionArgs, given: Sequence[Tensor]) -> None:
    """Raise Breach if a copy that the function got in another layout is no longer what it was."""
    for name, copy in zip("qkv", given, strict=True):
        original = getattr(args, name).transpose(1, 2).contiguous()
        if not torch.equal(original.view(torch.uint8), copy.view(torch.uint8)):
            raise Breach(f"changes its input {name}")


def _accept(
    result: object, given: Sequence[Tensor], out: Tensor, lse: Tensor | None, shape: str
) -> None:
    """Check what a plain function returned and copy it into the judge's buffers; shape: of O, in
    words.  Raises Breach."""
    if isinstance(result, tuple | list) and result:
        if lse is not None:
            second = result[1]
            if not isinstance(second, Tensor) or second.shape != lse.shape:
                raise Breach(
                    f"returned an LSE that is no tensor of shape {tuple(lse.shape)} (batch,"
                    " heads_q, seqlen_q)"
                )
            lse.copy_(second.detach())
        result = result[0]
    if type(result) is not Tensor and not isinstance(result, torch.nn.Parameter):
        raise Breach(f"returned {type(result).__name__}, not a torch.Tensor")
    if result.shape != out.shape:
        raise Breach(f"returned shape {tuple(result.shape)}, expected {tuple(out.shape)} {shape}")
    if result.dtype != out.dtype:
        raise Breach(f"returned dtype {result.dtype}, expected {out.dtype}")
    if result.device != out.device:
        raise Breach(f"returned a tensor on {result.device}, expected {out.device}")
    for name, tensor in zip("qkv", given, strict=True):
        if (
            tensor.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
            and result.numel()
        ):
            raise Breach(f"returned its input {name}")
    out.copy_(result.detach())
