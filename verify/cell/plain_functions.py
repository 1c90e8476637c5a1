"""Plain functions: (q, k, v, ...) -> out or (out, lse); their signatures make them variants."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from references.masks import mask_words
from verify.adapters import adapter_named, signature
from verify.cell import plain_gradients
from verify.cell.breach import Breach, Undeclared
from verify.cell.layout_twins import LAYOUTS, twin
from verify.cell.plain_callables import as_function, is_callable
from verify.cell.plain_signature import Signature, how_to_call, packs
from verify.cell.signatures import as_documented
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
from verify.variant.checks import flag, one_of, some_of, wholes
from verify.variant.validation import INPUT_DTYPES, MOST_HEAD_DIM, within

# The weakest honest arithmetic: everything rounded to the input's dtype, tf32 for fp32.
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
Call = Callable[[AttentionArgs, Sequence[Tensor]], Any]
"""(args, [q, k, v] in the function's layout) -> what the function returns."""

_SHAPES = {
    "bhsd": "(batch, heads, seqlen_q, head_dim_v)",
    "bshd": "(batch, seqlen_q, heads, head_dim_v)",
}
_RULES = {
    "DTYPES": some_of(*INPUT_DTYPES, least=1),
    "HEAD_DIMS": wholes(1, MOST_HEAD_DIM),
    "LAYOUT": one_of(*LAYOUTS),
    "MASKS": some_of(*mask_words(), least=1),
    "GRADIENTS": flag,
    "LIKE": signature,
    "WITHIN": within,
}


def variants(
    module: Any, path: Path, interpreted: bool = False
) -> tuple[tuple[Variant, ...], tuple[Variant, ...]]:
    """The variant of a file's plain function, with that of its gradients if the file says
    GRADIENTS = True; and the first one's twins, one for each other layout of LAYOUTS (`twin`).

    interpreted: Triton's interpreter runs it.  Raises Breach if the file has no such function,
    DeclarationError for one that cannot be called.
    """
    function = find(module, path)
    settings = _settings(sys.modules[function.__module__])
    layout = settings.get("LAYOUT", "bhsd")
    gradients = settings.get("GRADIENTS", False)
    # Only a GPU, and Triton's interpreter, multiply fp32 by tf32.
    by_tf32 = interpreted or torch.cuda.is_available()
    ieee = replace(WEAKEST, products=replace(WEAKEST.products, float32_products="ieee"))
    numerics = WEAKEST if by_tf32 else ieee
    if "LIKE" in settings:
        own, call, layout = _like(function, path.stem, settings)
        own = replace(own, numerics=numerics)
        own_gradients = plain_gradients.variant(own, call, layout) if gradients else None
        return as_documented(adapter_named(settings["LIKE"]), own, own_gradients), ()
    variants_by_layout = {
        each: replace(_variant(function, path.stem, settings, each), numerics=numerics)
        for each in LAYOUTS
    }
    twins = (
        replace(variant, name=twin(path.stem, each))
        for each, variant in variants_by_layout.items()
        if each != layout
    )
    own = variants_by_layout[layout]
    call = _by_signature(function, Signature.of(function))
    backward = (plain_gradients.variant(own, call, layout),) if gradients else ()
    return (own, *backward), tuple(twins)


def find(module: Any, path: Path) -> Callable[..., Any]:
    """What is named after LIKE or _NAMES: a function, or one of `plain_callables`; else the only
    public function that takes (q, k, v).  Raises Breach."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    functions = {
        name: value
        for name, value in public.items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    }
    wanted = (getattr(module, "LIKE", ""), *_NAMES)
    others = {name: public[name] for name in wanted if is_callable(public.get(name), name)}
    for name in wanted:
        if name in functions:
            return functions[name]
        if name in others:
            return as_function(others[name], name, module)
    candidates = [
        f for f in functions.values() if _leading(f) in (["q", "k", "v"], ["query", "key", "value"])
    ]
    if len(candidates) == 1:
        return candidates[0]
    nearly = "" if candidates else _nearly(list(functions.values()))
    raise Undeclared(
        f"{path.name} declares no VARIANT and has {'no' if not candidates else 'more than one'}"
        f" function of (q, k, v){nearly}: declare one, or name the function"
        f" {' or '.join(_NAMES[:2])}"
    )


def _nearly(functions: Sequence[Callable[..., Any]]) -> str:
    """The public functions that begin with q, and how to have one judged, as part of a message."""
    found = [f for f in functions if _leading(f)[:1] in (["q"], ["query"])]
    if not found:
        return ""
    parameters = list(inspect.signature(found[0]).parameters)
    text = f", only {found[0].__name__}({', '.join(parameters)})"
    return f"{text};{how_to_call(parameters)}" if packs(parameters) else text


def _leading(function: Callable[..., Any]) -> list[str]:
    return [name.lower() for name in list(inspect.signature(function).parameters)[:3]]


def _settings(module: Any) -> dict[str, Any]:
    """The module's settings, by the names in _RULES.  Raises DeclarationError."""
    settings = {}
    for name, rule in _RULES.items():
        if hasattr(module, name):
            try:
                settings[name] = rule(getattr(module, name))
            except ValueError as error:
                raise DeclarationError(f"{name}: {error}") from None
    return settings


def _by_signature(function: Callable[..., Any], signature: Signature) -> Call:
    return lambda args, inputs: function(*inputs, **signature.keywords(args))


def _variant(
    function: Callable[..., Any], name: str, settings: Mapping[str, Any], layout: str
) -> Variant:
    """The function as a variant with all features of its signature."""
    signature = Signature.of(function)
    support = Support(
        dtypes=settings.get("DTYPES", ("float16", "bfloat16", "float32")),
        head_dims=tuple(settings.get("HEAD_DIMS", (32, 64, 128))),
        masks=signature.masks_of(settings.get("MASKS")),
        grouped_heads=signature.grouped is not None,
        scales="any" if signature.scale is not None else "default",
        score_mods=("softcap",) if signature.softcap is not None else (),
        layouts="contiguous",
    )
    support = replace(support, **settings.get("WITHIN", {}))
    if signature.scale is None and support.scales != "default":
        raise DeclarationError("WITHIN: scales: the function has no parameter for a scale")
    lse = "natural" if _returns_lse(function) else None
    return _made(name, _by_signature(function, signature), layout, support, lse)


def _like(
    function: Callable[..., Any], name: str, settings: Mapping[str, Any]
) -> tuple[Variant, Call, str]:
    """The function as a variant with the signature that LIKE names, its call, and its layout.
    Raises DeclarationError for a setting that the signature does not have."""
    adapter = adapter_named(settings["LIKE"])
    layout = settings.get("LAYOUT", adapter.layout)
    if layout not in (adapter.layout, *adapter.layouts):
        raise DeclarationError(f"LAYOUT: that of {settings['LIKE']} is {adapter.layout}")
    asked, lse = adapter.lse or ("", None)
    named = asked in inspect.signature(function).parameters
    more = {asked: True} if named else {}
    function = partial(function, **adapter.layouts.get(layout, {}), **more)
    legal = adapter.support.masks
    for word in settings.get("MASKS", ()):
        if word not in legal:
            raise DeclarationError(
                f"MASKS: {word!r} is none of {', '.join(legal)}, which {settings['LIKE']} takes"
            )
    support = replace(
        adapter.support,
        dtypes=settings.get("DTYPES", adapter.support.dtypes),
        head_dims=tuple(settings.get("HEAD_DIMS", adapter.support.head_dims)),
        masks=settings.get("MASKS", legal),
        **settings.get("WITHIN", {}),
    )

    def call(args: AttentionArgs, inputs: Sequence[Tensor]) -> Any:
        q, k, v = inputs
        return adapter.call(function, args, q, k, v)

    return _made(name, call, layout, support, lse if named else None), call, layout


def _made(name: str, call: Call, layout: str, support: Support, lse: str | None) -> Variant:
    """A variant of a call.

    Its numerics are the weakest honest arithmetic: scores and probabilities are rounded to the
    input's dtype.
    """

    def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
        inputs = inputs_of(args, layout)
        result = call(args, inputs)
        if layout == "bshd":
            _check_unchanged(args, inputs)
        _accept(
            result, inputs, out.transpose(1, 2) if layout == "bshd" else out, lse, _SHAPES[layout]
        )

    return Variant(
        name=name,
        family="function",
        forward=forward,
        support=support,
        numerics=WEAKEST,
        contract=Contract(lse=lse),
        allocates_outputs=True,
    )


def _returns_lse(function: Callable[..., Any]) -> bool:
    """Whether every return statement in the function's source returns a pair."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return False
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return bool(returned) and all(
        isinstance(value, ast.Tuple) and len(value.elts) == 2 for value in returned
    )


def inputs_of(args: AttentionArgs, layout: str) -> list[Tensor]:
    """q, k and v in that layout; copies, unless it is "bhsd"."""
    inputs = [args.q, args.k, args.v]
    if layout == "bshd":
        inputs = [tensor.transpose(1, 2).contiguous() for tensor in inputs]
    return inputs


def _check_unchanged(args: AttentionArgs, inputs: Sequence[Tensor]) -> None:
    """Raise Breach if the function has changed a copy of an input in another layout."""
    for name, copy in zip("qkv", inputs, strict=True):
        original = getattr(args, name).transpose(1, 2).contiguous()
        if not torch.equal(original.view(torch.uint8), copy.view(torch.uint8)):
            raise Breach(f"changes its input {name}")


def _accept(
    result: object, inputs: Sequence[Tensor], out: Tensor, lse: Tensor | None, shape: str
) -> None:
    """Check the result of a plain function and copy it into the judge's buffers.

    shape: of O, as text.  Raises Breach.
    """
    if isinstance(result, tuple | list) and result:
        if lse is not None:
            second = result[1]
            if not isinstance(second, Tensor) or second.shape != lse.shape:
                raise Breach(
                    f"returned an LSE that is not a tensor of shape {tuple(lse.shape)} (batch,"
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
    for name, tensor in zip("qkv", inputs, strict=True):
        if (
            tensor.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
            and result.numel()
        ):
            raise Breach(f"returned its input {name}")
    out.copy_(result.detach())
