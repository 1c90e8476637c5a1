"""Loading kernel files, inside a cell: declared variants, or a plain function that is made into one."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from references.masks import Causal, Full
from verify.bundle import use_collection
from verify.variant import AttentionArgs, Contract, DeclarationError, Numerics, Support, Variant, Workspace


class Breach(Exception):  # noqa: N818 - a verdict, not an error of ours
    """The kernel broke the interface: wrong shape, dtype, device or type, or an output that is an input."""


@dataclass(frozen=True)
class Loaded:
    """What a file holds; undeclared if its one variant was made from a plain function; sources: see `sources_of`."""

    variants: tuple[Variant, ...]
    undeclared: bool
    sources: tuple[str, ...]
    interpreted: bool  # the file holds Triton kernels, and Triton interprets here


# What is honest in eager mode and in a first kernel: everything rounded to the input's dtype, tf32 for fp32.
_WEAKEST = Numerics(
    float32_products="tf32",
    scores="input",
    normalised=True,
    normaliser="lse",
    prescale="q",
    exp="exp_u20",
    block_n=16,
    scale_roundings=3,
)
_NAMES = ("attention", "forward", "flash_attention", "flash_attn_func", "scaled_dot_product_attention", "sdpa", "mha")
_CAUSAL = ("causal", "is_causal")
_SCALE = ("softmax_scale", "sm_scale", "scale")
_MASK = ("attn_mask", "mask")


def load(path: Path, package_root: str) -> Loaded:
    """Import a kernel file and return its variants.

    `VARIANT` or `VARIANTS` is taken as declared; else a function named after _NAMES, or the only public function that takes
    (q, k, v).  Raises Breach when the file holds neither.
    """
    try:
        module = _import(path, Path(package_root))
    except DeclarationError as error:  # it says all that there is to say; a traceback would bury it
        raise Breach(f"{path.name}: {error}") from None
    files = (getattr(other, "__file__", None) for other in list(sys.modules.values()))
    # torch's own pseudo-modules call themselves "_ops.py" and the like, which is no path.
    real = (Path(file) for file in files if file and Path(file).is_absolute())
    sources = sources_of({file.resolve() for file in real}, path.resolve(), Path(package_root).resolve() / "kernels" / "cuda")
    interpreted = any(type(value).__name__ == "InterpretedFunction" for value in vars(module).values())
    declared = getattr(module, "VARIANTS", None)
    declared = [module.VARIANT] if declared is None and hasattr(module, "VARIANT") else declared
    if declared is not None:
        variants = tuple(declared)
        if not variants or not all(isinstance(variant, Variant) for variant in variants):
            raise Breach(f"{path.name}: VARIANT must be a verify.variant.Variant, VARIANTS a list of them")
        return Loaded(variants, False, sources, interpreted)
    return Loaded((_from_function(_find_function(module, path), path.stem, interpreted),), True, sources, interpreted)


def sources_of(imported: set[Path], path: Path, cuda: Path) -> tuple[str, ...]:
    """What a kernel's hash covers: the files imported from its folder; of a CUDA kernel also its .cu file, and of kernels/cuda
    what it imports and every header."""
    beside = {file for file in imported if file.parent == path.parent}
    texts = {path.with_suffix(".cu")}
    if cuda / "compile.py" in imported:
        texts |= {file for file in imported if file.parent == cuda} | set(cuda.glob("*.cuh"))
    return tuple(sorted(str(file) for file in beside | {text for text in texts if text.is_file()}))


def _import(path: Path, root: Path) -> Any:
    path = path.resolve()
    if path.is_relative_to(root / "kernels") or path.is_relative_to(root / "tests"):
        use_collection()
    if path.is_relative_to(root / "kernels"):
        return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    if not path.is_file():
        raise Breach(f"{path.name}: no such file")
    name = f"accused_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Breach(f"{path.name}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def _find_function(module: Any, path: Path) -> Callable[..., Any]:
    functions = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
    }
    for name in _NAMES:
        if name in functions:
            return functions[name]
    candidates = [f for f in functions.values() if _leading(f) in (["q", "k", "v"], ["query", "key", "value"])]
    if len(candidates) == 1:
        return candidates[0]
    raise Breach(
        f"{path.name} declares no VARIANT and has {'no' if not candidates else 'more than one'} function of (q, k, v): "
        f"declare one, or name the function {' or '.join(_NAMES[:2])}"
    )


def _leading(function: Callable[..., Any]) -> list[str]:
    return [name.lower() for name in list(inspect.signature(function).parameters)[:3]]


def _from_function(function: Callable[..., Any], name: str, interpreted: bool = False) -> Variant:
    """A plain function (q, k, v, ...) -> out or (out, lse), as a variant with the most that its signature promises.

    It is judged as eager arithmetic, the weakest that is honest: scores and probabilities rounded to the input's dtype.
    Causal masks are drawn square only, where both alignments agree, and every row sees a key.
    """
    parameters = inspect.signature(function).parameters
    causal, scale, mask = (next((n for n in names if n in parameters), None) for names in (_CAUSAL, _SCALE, _MASK))

    def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
        keywords: dict[str, Any] = {}
        if isinstance(args.mask, Causal) and causal is not None:
            keywords[causal] = True
        elif not isinstance(args.mask, Full) and mask is not None:
            shape = args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv
            keywords[mask] = args.mask.dense(*shape, device=args.q.device).contiguous()
        if scale is not None:
            keywords[scale] = args.softmax_scale
        if "enable_gqa" in parameters and args.heads_q != args.heads_kv:
            keywords["enable_gqa"] = True
        _accept(function(args.q, args.k, args.v, **keywords), args, out, lse)

    masks = ("full",) + (("causal.square",) if causal or mask else ())
    return Variant(
        name=name,
        family="function",
        forward=forward,
        support=Support(
            dtypes=tuple(getattr(sys.modules[function.__module__], "DTYPES", ("float16", "bfloat16", "float32"))),
            head_dims=tuple(getattr(sys.modules[function.__module__], "HEAD_DIMS", (32, 64, 128))),
            masks=masks,
            grouped_heads="enable_gqa" in parameters,
            scales="any" if scale is not None else "default",
            layouts="contiguous",
        ),
        # Only a GPU, and Triton's interpreter, multiply fp32 by tf32.
        numerics=_WEAKEST if interpreted or torch.cuda.is_available() else replace(_WEAKEST, float32_products="ieee"),
        contract=Contract(lse="natural" if _returns_lse(function) else None),
        allocates_outputs=True,
    )


def _returns_lse(function: Callable[..., Any]) -> bool:
    """Whether the function's own text returns a pair; read, not run, because running it here would be no case."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return False
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return bool(returned) and all(isinstance(value, ast.Tuple) and len(value.elts) == 2 for value in returned)


def _accept(result: object, args: AttentionArgs, out: Tensor, lse: Tensor | None) -> None:
    """Check what a plain function returned and copy it into the judge's buffers.  Raises Breach."""
    if isinstance(result, tuple | list) and result:
        if lse is not None:
            second = result[1]
            if not isinstance(second, Tensor) or second.shape != lse.shape:
                raise Breach(f"returned an LSE that is no tensor of shape {tuple(lse.shape)} (batch, heads_q, seqlen_q)")
            lse.copy_(second.detach())
        result = result[0]
    if type(result) is not Tensor and not isinstance(result, torch.nn.Parameter):
        raise Breach(f"returned {type(result).__name__}, not a torch.Tensor")
    if result.shape != out.shape:
        raise Breach(f"returned shape {tuple(result.shape)}, expected {tuple(out.shape)} (batch, heads, seqlen_q, head_dim_v)")
    if result.dtype != out.dtype:
        raise Breach(f"returned dtype {result.dtype}, expected {out.dtype}")
    if result.device != out.device:
        raise Breach(f"returned a tensor on {result.device}, expected {out.device}")
    for name in ("q", "k", "v"):
        if getattr(args, name).untyped_storage().data_ptr() == result.untyped_storage().data_ptr() and math.prod(result.shape):
            raise Breach(f"returned its input {name}")
    out.copy_(result.detach())
