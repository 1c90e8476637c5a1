"""Variant: a kernel and what it declares of itself.  Every declaration is plain data, checked, and none is believed.

A kernel file ends with `VARIANT = Variant(...)` (or `VARIANTS = [...]`).  The judge reads declarations from a child process;
it never imports a kernel.  A kernel imports this module, `references.masks` and nothing else of the suite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from references.masks import Causal, Dense, Intersection, Mask, Window

Workspace = dict[str, Tensor]


class Unsupported(Exception):  # noqa: N818 - a refusal is not an error of the kernel
    """What a kernel raises for an input outside its support, before it touches any buffer; names the argument."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(f"{argument}: {reason}")
        self.argument = argument
        self.reason = reason


class Shape(Protocol):
    """What `Support` looks at; both `AttentionArgs` and `verify.problem.Problem` have it."""

    @property
    def heads_q(self) -> int: ...
    @property
    def heads_kv(self) -> int: ...
    @property
    def seqlen_q(self) -> int: ...
    @property
    def seqlen_kv(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def mask(self) -> Mask: ...
    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float: ...


_LETTERS = {"m": "block_m", "n": "block_n", "w": "num_warps", "s": "num_stages"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What an autotuner or a launcher may choose.  `options` holds choices that only one family has."""

    block_m: int | None = None
    block_n: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    options: tuple[tuple[str, int | str], ...] = ()

    @property
    def name(self) -> str:
        numbers = {letter: getattr(self, field) for letter, field in _LETTERS.items()}
        text = "".join(f"{letter}{value}" for letter, value in numbers.items() if value is not None)
        return "-".join([text or "default", *(f"{key}_{value}" for key, value in self.options)])

    @staticmethod
    def parse(name: str) -> Config:
        """The config of that name; raises ValueError."""
        text, *options = name.split("-")
        letters = {} if text == "default" else dict(re.findall(r"([mnws])(\d+)", text))
        if text != "default" and (not text or "".join(f"{letter}{value}" for letter, value in letters.items()) != text):
            raise ValueError(f"{name!r} is not a config's name")
        numbers = {field: int(letters[letter]) for letter, field in _LETTERS.items() if letter in letters}
        pairs = (option.rsplit("_", 1) for option in options)
        return Config(**numbers, options=tuple((key, int(value) if value.isdecimal() else value) for key, value in pairs))


@dataclass(frozen=True)
class AttentionArgs:
    """What a kernel gets: q (batch, heads_q, seqlen_q, head_dim), k (batch, heads_kv, seqlen_kv, head_dim) and v (the same
    with head_dim_v), with any strides; `softmax_scale` may be zero or negative; `softcap` 0 means none.

    Never the Problem: no seed, no distribution, no name of the test.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    softmax_scale: float
    softcap: float
    config: Config

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads_q(self) -> int:
        return self.q.shape[1]

    @property
    def heads_kv(self) -> int:
        return self.k.shape[1]

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[2]

    @property
    def seqlen_kv(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[3]

    @property
    def dtype(self) -> str:
        return str(self.q.dtype).removeprefix("torch.")

    @property
    def scale(self) -> float:
        return self.softmax_scale


ROW_ALIGNMENT = 16  # bytes: what vector loads and TMA need
SCALES = ("any", "positive", "default")
LAYOUTS = ("any", "aligned", "contiguous")
MASK_KINDS = ("full", "causal", "causal.tl", "causal.square", "window", "lengths", "documents", "prefix", "dense")


@dataclass(frozen=True, kw_only=True)
class Support:
    """Inside it the bounds hold; outside it the kernel raises `Unsupported` naming the argument.

    masks: kinds out of MASK_KINDS.  "causal.square" is causal where seqlen_q == seqlen_kv only (both alignments agree there);
    "window" covers both alignments; `intersections` says whether several may be combined.
    scales: softmax_scale may be "any", "positive", or only the "default" head_dim ** -0.5.
    layouts: q, k, v and out may have "any" strides (head_dim innermost), "aligned" ones (every row begins at a multiple of 16
    bytes), or must be "contiguous".
    capability: the least CUDA compute capability, for kernels that run on "cuda".
    """

    dtypes: tuple[str, ...]
    head_dims: Sequence[int]
    masks: tuple[str, ...] = ("full", "causal")
    intersections: bool = False
    grouped_heads: bool = False
    separate_head_dim_v: bool = False
    cross_lengths: bool = True
    min_seqlen: int = 1
    max_seqlen: int | None = None
    scales: str = "any"
    softcap: bool = False
    layouts: str = "any"
    devices: tuple[str, ...] = ("cpu", "cuda")
    capability: tuple[int, int] = (7, 0)

    def __post_init__(self) -> None:
        unknown = set(self.masks) - set(MASK_KINDS)
        if unknown:
            raise ValueError(f"support.masks: {', '.join(sorted(unknown))} not in {', '.join(MASK_KINDS)}")
        for name, known in {"scales": SCALES, "layouts": LAYOUTS}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"support.{name}: {getattr(self, name)!r} not in {', '.join(known)}")

    def refusal(self, shape: Shape) -> tuple[str, str] | None:
        """(argument, reason) if that shape is outside this support, else None.  Layouts are checked by `check`."""
        for argument, broken, reason in self._rules(shape):
            if broken:
                return argument, reason
        return None

    def _rules(self, shape: Shape) -> list[tuple[str, bool, str]]:
        dims, lengths = (shape.head_dim, shape.head_dim_v), (shape.seqlen_q, shape.seqlen_kv)
        kind = self._mask_outside(shape)
        default = math.isclose(shape.scale, shape.head_dim**-0.5)
        return [
            ("dtype", shape.dtype not in self.dtypes, f"{shape.dtype} is none of {', '.join(self.dtypes)}"),
            ("head_dim", dims[0] not in self.head_dims, f"{dims[0]} is not supported"),
            ("head_dim_v", dims[1] not in self.head_dims, f"{dims[1]} is not supported"),
            ("head_dim_v", dims[0] != dims[1] and not self.separate_head_dim_v, f"{dims[1]} differs from head_dim {dims[0]}"),
            ("heads_kv", shape.heads_q != shape.heads_kv and not self.grouped_heads, "grouped heads are not supported"),
            ("seqlen_q", lengths[0] < self.min_seqlen, f"{lengths[0]} is less than {self.min_seqlen}"),
            ("seqlen_kv", lengths[1] < self.min_seqlen, f"{lengths[1]} is less than {self.min_seqlen}"),
            ("seqlen_kv", lengths[0] != lengths[1] and not self.cross_lengths, "must equal seqlen_q"),
            ("seqlen_kv", self.max_seqlen is not None and max(lengths) > self.max_seqlen, f"more than {self.max_seqlen}"),
            ("mask", kind is not None, f"{kind} is not supported"),
            ("softmax_scale", self.scales == "default" and not default, "only head_dim ** -0.5 is supported"),
            ("softmax_scale", self.scales == "positive" and shape.scale <= 0, f"{shape.scale} is not positive"),
            ("softcap", shape.softcap != 0 and not self.softcap, "is not supported"),
        ]

    def _mask_outside(self, shape: Shape) -> str | None:
        if isinstance(shape.mask, Intersection) and not self.intersections:
            return f"the intersection {shape.mask.name}"
        square = shape.seqlen_q == shape.seqlen_kv
        for atom in shape.mask.atoms:
            kinds = {atom.kind}
            if isinstance(atom, Causal):
                kinds = {"causal" if atom.alignment == "br" else "causal.tl"} | ({"causal.square"} if square else set())
            if not kinds & set(self.masks):
                return atom.name if isinstance(atom, Causal | Window | Dense) else atom.kind
        return None

    def check(self, args: AttentionArgs, out: Tensor) -> None:
        """Raise `Unsupported` if these arguments are outside this support.  A kernel's entry point begins with it."""
        found = self.refusal(args)
        if found is not None:
            raise Unsupported(*found)
        for name, tensor in {"q": args.q, "k": args.k, "v": args.v, "out": out}.items():
            if self.layouts == "contiguous" and not tensor.is_contiguous():
                raise Unsupported(f"layout_{name}", f"strides {tuple(tensor.stride())} are not contiguous")
            rows = [step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
            starts = (tensor.data_ptr(), *(step * tensor.itemsize for step in rows))
            if self.layouts == "aligned" and tensor.numel() and any(start % ROW_ALIGNMENT for start in starts):
                raise Unsupported(f"layout_{name}", f"rows do not begin at multiples of {ROW_ALIGNMENT} bytes")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How the kernel computes; the bounds follow from it.  Terms are those of docs/tolerance.md.

    operands: dtype of Q and K as they enter the product ("input" or "float32"); accumulator: of both products;
    float32_products: whether a product of fp32 operands is "ieee", may be "tf32", or is "tf32x3" (high and low parts).
    prescale: what the scale multiplies before QK^T: "none", "q" (q * scale) or "sqrt" (q and k * sqrt|scale|), rounded to
    the operands' dtype.  scores: dtype that QK^T is rounded to before the softmax ("float32" or "input").
    probability: dtype of P as it enters PV; normalised: whether P was divided by the row sum before that.
    normaliser: what P is divided by: the "sum", or "lse" where P = exp(S - LSE) with a rounded LSE.
    split_keys: whether the keys may be split into parts whose results are merged by their LSE (split-KV, flash decoding).
    exp: name of the exponential in `verify.arithmetic.instructions`.  block_n: keys per rescale (None: the config's; 0: all
    keys at once, no rescale).  softcap_tanh: name of the tanh.  scale_roundings: fp32 roundings in the factor that
    multiplies the scores (1 if the host rounds scale * log2(e) once, 3 if the kernel forms it in fp32).
    """

    operands: str = "input"
    float32_products: str = "ieee"
    accumulator: str = "float32"
    prescale: str = "none"
    scores: str = "float32"
    probability: str = "input"
    normalised: bool = False
    normaliser: str = "sum"
    split_keys: bool = False
    exp: str = "ex2.approx"
    block_n: int | None = None
    softcap_tanh: str = "tanhf"
    scale_roundings: int = 1


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What the kernel promises beyond numbers.

    lse: "natural", "base2" or None if it returns none.  empty_row_out and empty_row_lse: what a row without a key holds.
    deterministic: bitwise the same again.  masked_values: "any" if a masked key or value may be NaN without effect, "finite"
    if NaN at a masked place may spread.  batch_invariant: a sequence alone gives the same bits as in a batch.
    """

    lse: str | None = "natural"
    empty_row_out: float = 0.0
    empty_row_lse: float = -math.inf
    deterministic: bool = True
    masked_values: str = "finite"
    batch_invariant: bool = True


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An algorithm with an entry point.

    forward(args, out, lse, workspace) writes O (args' dtype) and LSE (float32, (batch, heads_q, seqlen_q)) into the judge's
    buffers; lse is None if the contract has none.  workspace(args) names the scratch buffers wanted, {name: (shape, dtype)};
    the judge allocates, poisons and guards them.  allocates_outputs: a library kernel that makes its own outputs, which the
    entry point copies.  available() returns why this variant cannot run here at all, or None.
    """

    name: str
    family: str
    forward: Callable[[AttentionArgs, Tensor, Tensor | None, Workspace], None]
    configs: Sequence[Config] = (Config(),)
    support: Support
    numerics: Numerics = Numerics()
    contract: Contract = Contract()
    workspace: Callable[[AttentionArgs], dict[str, tuple[tuple[int, ...], str]]] | None = None
    allocates_outputs: bool = False
    available: Callable[[], str | None] | None = None
    head_dim_buckets: tuple[int, ...] = ()
    witness: Sequence[str] = ()

    def describe(self) -> dict[str, Any]:
        """The declaration as JSON-ready data (see `Declaration`)."""
        from dataclasses import asdict

        return {
            "name": self.name,
            "family": self.family,
            "configs": [asdict(config) for config in self.configs],
            "support": asdict(self.support) | {"head_dims": list(self.support.head_dims)},
            "numerics": asdict(self.numerics),
            "contract": asdict(self.contract),
            "allocates_outputs": self.allocates_outputs,
            "has_workspace": self.workspace is not None,
            "head_dim_buckets": list(self.head_dim_buckets),
            "witness": list(self.witness),
            "unavailable": self.available() if self.available is not None else None,
        }


@dataclass(frozen=True)
class Declaration:
    """A variant as the judge knows it: data read from a child process, and where its source lies.

    ref: how a case names the variant (its name, or `path/to/file.py@name` for a file outside the collection).
    undeclared: made from a plain function.  interpreted: Triton's interpreter runs it here, so problems must be small.
    """

    ref: str
    path: str
    source_hash: str
    name: str
    family: str
    configs: tuple[Config, ...]
    support: Support
    numerics: Numerics
    contract: Contract
    allocates_outputs: bool = False
    has_workspace: bool = False
    head_dim_buckets: tuple[int, ...] = ()
    witness: tuple[str, ...] = ()
    unavailable: str | None = None
    undeclared: bool = False
    interpreted: bool = False

    def config(self, name: str) -> Config:
        """The config of that name; raises KeyError."""
        return {config.name: config for config in self.configs}[name]


def declaration_from(data: dict[str, Any], *, ref: str, path: str, source_hash: str) -> Declaration:
    """Rebuild a declaration from `Variant.describe`'s data (after JSON)."""
    support = dict(data["support"])
    for key in ("dtypes", "head_dims", "masks", "devices", "capability"):
        support[key] = tuple(support[key])
    configs = tuple(Config(**(c | {"options": tuple(tuple(o) for o in c["options"])})) for c in data["configs"])
    return Declaration(
        ref=ref,
        path=path,
        source_hash=source_hash,
        name=data["name"],
        family=data["family"],
        configs=configs,
        support=Support(**support),
        numerics=Numerics(**data["numerics"]),
        contract=Contract(**data["contract"]),
        allocates_outputs=data["allocates_outputs"],
        has_workspace=data["has_workspace"],
        head_dim_buckets=tuple(data["head_dim_buckets"]),
        witness=tuple(data["witness"]),
        unavailable=data["unavailable"],
        undeclared=data.get("undeclared", False),
        interpreted=data.get("interpreted", False),
    )
