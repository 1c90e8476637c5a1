"""Problem: the mathematics and the memory of one input, as one frozen value with a one-line name
that parses back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from references.definition import Attention
from references.masks import Full, Lengths, Mask, parse_mask
from references.output_scale import DTYPES as EIGHT_BITS
from references.output_scale import LARGEST, ScaledOutput
from references.premises import Feature
from references.quantisation import Quantisation, Unquantised, parse_quantisation
from references.score_mods import Extent, ScoreMod, mod_kind_of, mod_words
from verify.arithmetic.dtypes import DType, dtype_named
from verify.problem.storage import STRIDED, Layout, ProblemError, Storage, parse_storage
from verify.variant import default_dtype_out, storages_of

_CONTIGUOUS, _UNQUANTISED = Layout(), Unquantised()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One input.  Shapes: q (batch, heads_q, seqlen_q, head_dim), k (batch, heads_kv, seqlen_kv,
    head_dim), v with head_dim_v.

    softmax_scale multiplies the scores and may be zero or negative.  score_mod replaces each scaled
    score by a function of it, before the mask; None means none.  dtype_out is O's; 8-bit inputs
    give bfloat16 unless it says otherwise; output_scale is the s of an 8-bit O
    (`references.output_scale`). quantisation: which factors q, k and v come with. The
    layouts say how tensors lie in memory; layout_dout is that of the upstream gradient; dq, dk and
    dv lie like q, k and v where these are strided, with nothing expanded. distribution and seed
    choose the values (`verify.problem.inputs`). Raises ProblemError, naming the field, for what
    makes no sense.
    """

    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int = 0  # 0: the same as head_dim
    dtype: str
    mask: Mask = field(default_factory=Full)
    softmax_scale: float | None = None  # None: head_dim ** -0.5
    score_mod: ScoreMod | None = None
    layout_q: Storage = _CONTIGUOUS
    layout_k: Storage = _CONTIGUOUS
    layout_v: Storage = _CONTIGUOUS
    layout_out: Storage = _CONTIGUOUS
    layout_dout: Storage = _CONTIGUOUS
    dtype_out: str = ""  # see `default_dtype_out`
    output_scale: float = 1.0  # of an 8-bit O; a number of fp32
    quantisation: Quantisation = _UNQUANTISED
    distribution: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if self.softmax_scale is None:
            object.__setattr__(self, "softmax_scale", max(self.head_dim, 1) ** -0.5)
        if not self.dtype_out:
            object.__setattr__(self, "dtype_out", default_dtype_out(self.dtype))
        self._check_numbers()
        try:
            dtype_named(self.dtype)
            dtype_named(self.dtype_out)
            self.mask.check(self.batch)
        except ValueError as error:
            raise ProblemError(str(error)) from None
        self._check_values()
        for name, storage in self.layouts.items():
            if name not in storage.holds:
                holds = ", ".join(storage.holds)
                raise ProblemError(f"layout_{name}: {storage.word} storage is for {holds} only")
        for name, what in {"out": "an output", "dout": "an upstream gradient"}.items():
            if self.layouts[name].expand:
                raise ProblemError(f"layout_{name}: {what} cannot be expanded")

    def _check_values(self) -> None:
        if not re.fullmatch(r"\w+", self.distribution, re.ASCII):
            raise ProblemError(f"distribution: {self.distribution!r} is not a name")
        if self.seed < 0:
            raise ProblemError(f"seed: {self.seed} is negative")

    def _check_numbers(self) -> None:
        for name in ("batch", "heads_q", "heads_kv", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise ProblemError(f"{name}: {getattr(self, name)} is less than 1")
        for name in ("seqlen_q", "seqlen_kv"):
            if getattr(self, name) < 0:
                raise ProblemError(f"{name}: {getattr(self, name)} is negative")
        if self.heads_q % self.heads_kv:
            raise ProblemError(
                f"heads_q: {self.heads_q} is no multiple of heads_kv = {self.heads_kv}"
            )
        self._check_output_scale()
        if not math.isfinite(self.scale):
            raise ProblemError(f"softmax_scale: {self.scale} is not finite")
        if self.score_mod is not None and self.score_mod.word in _FIELDS:
            raise ProblemError(f"score_mod: {self.score_mod.word!r} is a field of problems")
        if 0 < abs(self.scale) < 2.0 ** dtype_named("float32").emin:
            raise ProblemError(
                f"softmax_scale: {self.scale} is below fp32's normal range, in which kernels"
                " hold it"
            )
        if abs(self.scale) > dtype_named("float32").max:
            raise ProblemError(
                f"softmax_scale: {self.scale} is above fp32's largest number, and kernels hold it"
                " in fp32"
            )

    def _check_output_scale(self) -> None:
        scale = self.output_scale
        if scale != 1 and self.dtype_out not in EIGHT_BITS:
            raise ProblemError(
                f"output_scale: {scale} is for outputs in {' or '.join(EIGHT_BITS)}, not in"
                f" {self.dtype_out}"
            )
        if not 1 / LARGEST <= scale <= LARGEST:
            raise ProblemError(f"output_scale: {scale} is not between 2**-64 and 2**64")
        if scale != float(np.float32(scale)):
            raise ProblemError(
                f"output_scale: {scale} is no number of fp32, in which kernels get it"
            )

    @property
    def attention(self) -> Attention:
        """Mask, scale and score mod, as the references take them."""
        return Attention(self.mask, self.scale, self.score_mod)

    @property
    def extent(self) -> Extent:
        """What a score mod counts positions in."""
        return Extent(self.heads_q, self.seqlen_q, self.seqlen_kv)

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """Everything in this problem that is not plain attention on strided tensors."""
        found: list[Feature] = []
        if self.score_mod is not None:
            found.append(self.score_mod)
        if self.quantisation.scaled:
            found.append(self.quantisation)
        found += dict.fromkeys(x for x in self.layouts.values() if x.word != STRIDED)
        if self.scaled_output is not None:
            found.append(self.scaled_output)
        return tuple(found)

    @property
    def scaled_output(self) -> ScaledOutput | None:
        """The feature of an 8-bit O; None where O has more bits."""
        eight = self.dtype_out in EIGHT_BITS
        return ScaledOutput(self.dtype_out, self.output_scale) if eight else None

    @property
    def descaling(self) -> str:
        """The word of the quantisation, as `Support.descalings` lists it."""
        return self.quantisation.word

    @property
    def storages(self) -> dict[str, str]:
        """As `storages_of`."""
        named = {name: self.layouts[name] for name in ("q", "k", "v")}
        return storages_of({name: x for name, x in named.items() if x.word != STRIDED})

    @property
    def scale(self) -> float:
        assert self.softmax_scale is not None
        return self.softmax_scale

    @property
    def format(self) -> DType:
        return dtype_named(self.dtype)

    @property
    def format_out(self) -> DType:
        return dtype_named(self.dtype_out)

    @property
    def group(self) -> int:
        """Query heads per key head; query head h reads key head h // group."""
        return self.heads_q // self.heads_kv

    @property
    def shape_q(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_q, self.seqlen_q, self.head_dim

    @property
    def shape_k(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_kv, self.seqlen_kv, self.head_dim

    @property
    def shape_v(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_kv, self.seqlen_kv, self.head_dim_v

    @property
    def shape_out(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_q, self.seqlen_q, self.head_dim_v

    @property
    def shape_dout(self) -> tuple[int, int, int, int]:
        return self.shape_out

    @cached_property
    def layouts(self) -> Mapping[str, Storage]:
        """Of every tensor with a storage of its own."""
        return {name: getattr(self, f"layout_{name}") for name in ("q", "k", "v", "out", "dout")}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, int, int, int]]:
        """Of the tensors in `layouts`."""
        return {
            "q": self.shape_q,
            "k": self.shape_k,
            "v": self.shape_v,
            "out": self.shape_out,
            "dout": self.shape_out,
        }

    @property
    def pairs(self) -> int:
        """(query, key) pairs over all heads: what the cost of judging grows with."""
        return self.batch * self.heads_q * self.seqlen_q * self.seqlen_kv

    def kv_lengths(self) -> tuple[int, ...]:
        """Valid keys per sequence, as a `Lengths` mask says or seqlen_kv."""
        whole = (self.seqlen_kv,) * self.batch
        given = [part.kv_lengths for part in self.mask.atoms if isinstance(part, Lengths)]
        return tuple(min(lengths) for lengths in zip(whole, *given, strict=True))

    @cached_property
    def name(self) -> str:
        """One line that `Problem.parse` reads back; fields at their defaults are left out."""
        of_values = [
            f"{_KEYS[name]}={value}"
            for name in _VALUES
            if (value := getattr(self, name)) != getattr(Problem, name)  # its default
        ]
        return ",".join([self._name_without_values, *of_values])

    @cached_property
    def _name_without_values(self) -> str:
        return ",".join(f"{key}={text}" for key, text in self._texts())

    def _texts(self) -> Iterator[tuple[str, str]]:
        defaults = {f.name: f.default for f in fields(self)}
        defaults |= {
            "softmax_scale": self.head_dim**-0.5,
            "head_dim_v": self.head_dim,
            "mask": Full(),
        }
        defaults |= {"dtype_out": default_dtype_out(self.dtype)}
        for name in _WITHOUT_VALUES:
            key, value = _KEYS[name], getattr(self, name)
            if isinstance(value, ScoreMod):
                yield value.word, value.text
            elif value != defaults[name]:
                named = isinstance(value, Mask | Storage | Quantisation)
                yield key, value.name if named else str(value)

    @staticmethod
    def parse(text: str) -> Problem:
        """The Problem of that name; raises ProblemError with the part that does not parse."""
        values: dict[str, object] = {}
        named = _FIELDS | dict.fromkeys(mod_words(), "score_mod")
        for item in text.split(","):
            key, equals, value = item.partition("=")
            if not equals or key not in named or named[key] in values:
                raise ProblemError(
                    f"{item!r} is not a field of a problem (fields: {', '.join(named)})"
                )
            try:
                values[named[key]] = _read(named[key], key, value)
            except ValueError as error:
                raise ProblemError(f"{key}: {value!r} does not parse ({error})") from None
        try:
            return Problem(**values)  # type: ignore[arg-type]
        except TypeError as error:
            raise ProblemError(f"{text!r} is not a whole problem: {error}") from None

    @cached_property
    def plain_valued(self) -> Problem:
        """This problem with distribution "normal" and seed 0: one for all that `valued` makes of
        each other."""
        known = {name: getattr(self, name) for name in _KNOWN_WITHOUT_VALUES}
        plain = object.__new__(Problem)
        vars(plain).update(known, distribution=Problem.distribution, seed=Problem.seed)
        vars(plain)["plain_valued"] = plain
        return plain

    def valued(self, distribution: str, seed: int) -> Problem:
        """This problem with other values, and all that follows from the rest of it: made without
        checking that again.  Raises ProblemError."""
        other = object.__new__(Problem)
        vars(other).update(vars(self.plain_valued), distribution=distribution, seed=seed)
        vars(other).pop("name", None)
        other._check_values()
        return other

    def but(self, **changes: object) -> Problem:
        """This problem with some fields changed; dtype_out goes along with dtype where it was the
        default."""
        if "dtype" in changes and self.dtype_out == default_dtype_out(self.dtype):
            changes = {"dtype_out": "", **changes}
        return replace(self, **changes)  # type: ignore[arg-type]


def _read(name: str, key: str, text: str) -> object:
    if name == "mask":
        return parse_mask(text)
    if name == "score_mod":
        return mod_kind_of(key).parse(text)
    if name.startswith("layout_"):
        return parse_storage(text)
    if name == "quantisation":
        return parse_quantisation(text)
    if name in ("softmax_scale", "output_scale"):
        return float(text)
    return text if name in ("dtype", "dtype_out", "distribution") else int(text)


_KEYS = {
    "batch": "b",
    "heads_q": "hq",
    "heads_kv": "hkv",
    "seqlen_q": "sq",
    "seqlen_kv": "skv",
    "head_dim": "d",
    "head_dim_v": "dv",
    "dtype": "dtype",
    "mask": "mask",
    "softmax_scale": "scale",
    "score_mod": "",  # its key is its word
    "layout_q": "lq",
    "layout_k": "lk",
    "layout_v": "lv",
    "layout_out": "lo",
    "layout_dout": "ldo",
    "dtype_out": "out",
    "output_scale": "oscale",
    "quantisation": "descale",
    "distribution": "dist",
    "seed": "seed",
}
_FIELDS = {key: name for name, key in _KEYS.items() if key}
_VALUES = ("distribution", "seed")  # the last two of a name
_WITHOUT_VALUES = tuple(name for name in _KEYS if name not in _VALUES)
_KNOWN_WITHOUT_VALUES = (*_WITHOUT_VALUES, "features", "layouts", "shapes", "_name_without_values")
