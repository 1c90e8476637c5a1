"""Validation: what each field of a declaration may hold, and the one-line error that names it.

`RULES` is the one table.  A `Declared` class is checked by the rules of its path when it is made; a
test holds that every field has a rule, or is a part that has rules of its own.

Ceilings of counts are wider than the longest honest kernel needs (the figures stand beside them):
past that a declaration buys nothing but a wider bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import ClassVar, Self

from references.masks import mask_words
from references.quantisation import quantisation_words
from references.score_mods import mod_words
from verify.arithmetic.archs import INSTRUCTIONS
from verify.arithmetic.dtypes import DTYPES
from verify.arithmetic.instructions import DIVISION, EXP, TANH_ERROR
from verify.brief import shown
from verify.variant.checks import (
    Check,
    any_number,
    flag,
    instance_of,
    matching,
    number,
    one_of,
    power_of_two,
    sequence,
    some_of,
    whole,
    wholes,
)

# Of the kinds in references/masks/.  "causal.square" is older than SQUARE_KINDS, and not among
# them.
_SQUARES = (word for word in mask_words() if word.endswith(".square"))
SQUARE_KINDS = tuple(word for word in _SQUARES if word != "causal.square")
MASK_KINDS = tuple(word for word in mask_words() if word not in SQUARE_KINDS)
SCALES = ("any", "nonzero", "positive", "default")
WINDOWS = ("any", "one_sided", "symmetric", "causal")
LAYOUTS = ("any", "aligned", "contiguous")
DESCALINGS = quantisation_words()
DEVICES = ("cpu", "cuda")
# What a kernel may read.  float64 is no dtype of an attention kernel: no bound is derived for it.
INPUT_DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")

MOST_HEAD_DIM = 1 << 16  # 576 is the largest in use
MOST_TOKENS = 1 << 31
MOST_STEP = 1 << 12  # tokens that a length is a multiple of; 128 are the most in use
MOST_BLOCK = 1 << 20  # 512 keys are the largest block in use; whole rows are "0"
# The longest chain has 7: softcap there and back 2, descales of Q and K 2, scale * log2(e) in fp32
# 3.
MOST_ROUNDINGS = 16
MOST_PRODUCTS = 1 << 16  # 128 products between promotions are the most in use
MOST_LANES = 1 << 10  # threads of a block; 4 share a row in FlashAttention-2
MOST_LAG = 126.0  # log2 units: fp32's range; FlashAttention-4 lets 8 pass
LARGEST_FLOOR = 2.0**-10  # of a factor; 1e-7 is in use
LARGEST_SCALE = 2.0**16  # of P: no 8-bit format holds more; FlashAttention-3 takes 2^8
MOST_WARPS = 32  # 1024 threads
MOST_STAGES = 64


class DeclarationError(ValueError):
    """A declaration that makes no sense, in one line: the field, what it holds, and what it may
    hold."""


class Declared:
    """A frozen dataclass with keywords alone that is checked when it is made.

    path: what errors and reports call it, as "numerics.products", and its rules' key in `RULES`.
    A field whose default is made by a class is a part and takes an instance of that class.  Raises
    DeclarationError that names the first field that is unknown or holds what it may not.
    """

    path: ClassVar[str]

    def __init_subclass__(cls, path: str | None = None) -> None:
        if path is not None:
            cls.path = path

    def __new__(cls, *_: object, **values: object) -> Self:
        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        if unknown := [name for name in values if name not in names]:
            raise DeclarationError(
                f"{cls.path}.{unknown[0]}: no such field; {cls.path} has {', '.join(names)}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        rules = RULES.get(self.path, {})
        for each in fields(self):  # type: ignore[arg-type]
            value, part = getattr(self, each.name), each.default_factory
            rule = instance_of(part) if isinstance(part, type) else rules.get(each.name)
            if rule is None:
                continue
            try:
                kept = rule(value)
            except ValueError as error:
                raise DeclarationError(f"{self.path}.{each.name}: {error}") from None
            if kept is not value:
                object.__setattr__(self, each.name, kept)


def _capability(value: object) -> object:
    pair = sequence(value, "two whole numbers, as (9, 0)")
    if len(pair) != 2 or any(
        isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= 99 for n in pair
    ):
        raise ValueError(f"{shown(value)} is no pair of whole numbers from 0 to 99, as (9, 0)")
    return pair


def _capability_or_none(value: object) -> object:
    return None if value is None else _capability(value)


def _options(value: object) -> object:
    several = sequence(value, "pairs of a name and a number or word")
    for pair in several:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"{shown(pair)} is no pair of a name and a number or word")
        if not isinstance(pair[0], str) or not isinstance(pair[1], int | str):
            raise ValueError(f"{shown(pair)} is no pair of a name and a whole number or word")
    kept = tuple(tuple(pair) for pair in several)
    return value if kept == value else kept


def _masks(value: object) -> object:
    """Words of the kinds that are registered when a declaration is made."""
    words = dict.fromkeys((*MASK_KINDS, *SQUARE_KINDS, *mask_words()))
    return some_of(*words, least=1)(value)


def _score_mods(value: object) -> object:
    """The same of score mods."""
    return some_of(*mod_words())(value)


def _descalings(value: object) -> object:
    """Words of the quantisations that are registered when a declaration is made."""
    return some_of(*quantisation_words(), least=1)(value)


def _storages(value: object) -> object:
    """Words of storages, one at least.  Whether there are such, the judge asks."""
    words = sequence(value, "words of storages")
    for word in words:
        if not isinstance(word, str) or not re.fullmatch(r"[a-z]+", word):
            raise ValueError(f"{shown(word)} is no word of a storage, as 'strided'")
    if not words or len(set(words)) < len(words):
        raise ValueError(f"{shown(value)} is empty or names one twice")
    return words


def _promotion(value: object) -> object:
    """A number of products, or "block"."""
    return one_of("block")(value) if isinstance(value, str) else whole(0, MOST_PRODUCTS)(value)


def _split_keys(value: object) -> object:
    """Whether, or "input"."""
    return one_of("input")(value) if isinstance(value, str) else flag(value)


def _grouped_heads(value: object) -> object:
    """Whether, or "only"."""
    return one_of("only")(value) if isinstance(value, str) else flag(value)


_block = whole(0, MOST_BLOCK, optional=True)
_configured = whole(1, MOST_BLOCK, optional=True)
_roundings = whole(0, MOST_ROUNDINGS)
_kept = one_of("input", *DTYPES)
_products = one_of("ieee", "tf32", "tf32x3")

RULES: dict[str, dict[str, Check]] = {
    "config": {
        "block_m": _configured,
        "block_n": _configured,
        "num_warps": whole(1, MOST_WARPS, optional=True),
        "num_stages": whole(0, MOST_STAGES, optional=True),
        "options": _options,
    },
    "support": {
        "dtypes": some_of(*DTYPES, least=1),
        "head_dims": wholes(1, MOST_HEAD_DIM),
        "dtypes_out": some_of(*DTYPES),
        "descalings": _descalings,
        "masks": _masks,
        "intersections": flag,
        "windows": one_of(*WINDOWS),
        "grouped_heads": _grouped_heads,
        "separate_head_dim_v": flag,
        "cross_lengths": flag,
        "longer_q": flag,
        "seqlen_q_multiple": whole(1, MOST_STEP),
        "seqlen_kv_multiple": whole(1, MOST_STEP),
        "min_seqlen": whole(0, MOST_TOKENS),
        "max_seqlen": whole(0, MOST_TOKENS, optional=True),
        "scales": one_of(*SCALES),
        "score_mods": _score_mods,
        "layouts": one_of(*LAYOUTS),
        "storages": _storages,
        "devices": some_of(*DEVICES, least=1),
        "capability": _capability,
        "max_capability": _capability_or_none,
    },
    "numerics.products": {
        "operands": _kept,
        "float32_products": _products,
        "instruction": one_of("any", *INSTRUCTIONS),
        "accumulator": one_of("float32", "float16", "bfloat16"),
        "score_accumulator": one_of("float32", "float16", "bfloat16", None),
        "accumulator_rounded": one_of("product", "block"),
        "prescale": one_of("none", "q", "sqrt"),
        "promotion": _promotion,
    },
    "numerics.softmax": {
        "exp": one_of(*EXP),
        "scale_roundings": _roundings,
        "softcap_tanh": one_of(*TANH_ERROR),
        "scores": one_of("float32", "input"),
        "rescale_exp": one_of(*EXP, None),
        "block_n": _block,
    },
    "numerics.softmax.maximum": {
        "lag": number(0, MOST_LAG),
        "rows": _block,
        "excess": number(0, MOST_LAG),
        "step": number(0, 1),
        "key_order": one_of("any", "ascending", "descending", "whole_first"),
        "parts": whole(0, MOST_BLOCK, optional=True),
    },
    "numerics.softmax.row_sum": {
        "of": one_of("unrounded", "rounded", "mma", "any"),
        "lanes": whole(1, MOST_LANES),
        "apart": flag,
        "lse": one_of("any", "log2"),
    },
    "numerics.output": {
        "probability": _kept,
        "values": one_of("probability", "input"),
        "probability_scale": power_of_two(1 / LARGEST_SCALE, LARGEST_SCALE),
        "normalised": flag,
        "normaliser": one_of("sum", "lse"),
        "split_keys": _split_keys,
        "division": one_of("any", *DIVISION),
        "roundings": _roundings,
    },
    "numerics.order": {"head_dim": one_of("any", "ascending")},
    "numerics.quantised": {
        "products": one_of("none", "int8"),
        "query_tile": _block,
        "key_tile": _block,
        "floor": number(0, LARGEST_FLOOR),
        "query_scaled": flag,
        "centred": one_of("none", "input", "float32"),
        "value_top": number(0, LARGEST_SCALE),
        "probability_top": number(0, LARGEST_SCALE),
    },
    "gradients.products": {
        "operands": _kept,
        "float32_products": _products,
        "instruction": one_of("any", *INSTRUCTIONS),
        "accumulator": one_of("float32", "bfloat16"),
        "score_accumulator": one_of("float32", "bfloat16", None),
        "prescale": one_of("none", "k", "sqrt", "alpha"),
    },
    "gradients.softmax": {
        "exp": one_of(*EXP),
        "scale_roundings": _roundings,
        "softcap_tanh": one_of(*TANH_ERROR),
        "source": one_of("saved", "own"),
        "probability": _kept,
    },
    "gradients.score_gradient": {
        "dtype": _kept,
        "of": one_of("unrounded", "rounded"),
        "scaled": flag,
        "delta": _kept,
        "delta_of": one_of("output", "weights"),
    },
    "gradients.sums": {
        "block_m": _block,
        "block_n": _block,
        "group": one_of("float32", "cast"),
        "atomics": some_of("dq", "dk", "dv"),
        "atomics_dtype": _kept,
        "roundings": _roundings,
    },
    "gradients.order": {
        "head_dim": one_of("any", "ascending"),
        "keys": one_of("any", "ascending", "whole_first"),
        "rows": one_of("any", "ascending", "whole_first"),
    },
    "witness": {
        "case": matching(r"[\x21-\x7e]+:[^:\s]+:[^:\s]+:[^\s]+", "case id"),
        "tensor": one_of("out", "lse", "dq", "dk", "dv"),
        "r": number(0, 1e300),
        "device": matching(r"[\w ()@.,+/-]{1,80}", "device's name"),
        "date": matching(r"\d{4}-\d{2}-\d{2}", "date, as 2026-11-22"),
    },
    "contract": {
        "lse": one_of("natural", "base2", None),
        "empty_row_out": any_number,
        "empty_row_lse": any_number,
        "deterministic": flag,
        "masked_values": one_of("any", "padding", "finite"),
        "nan": one_of("propagates", "out", "any"),
        "batch_invariant": flag,
        "deterministic_backward": flag,
        "masked_values_backward": one_of("any", "padding", "finite"),
    },
}

WITHIN = (
    "min_seqlen",
    "max_seqlen",
    "cross_lengths",
    "longer_q",
    "seqlen_q_multiple",
    "seqlen_kv_multiple",
    "windows",
    "grouped_heads",
    "scales",
)
"""Words of support that an undeclared function can have, too."""


def within(value: object) -> object:
    """A mapping of words out of WITHIN to what a support may hold there."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{shown(value)} is no mapping of {', '.join(WITHIN)}")
    for name, each in value.items():
        if name not in WITHIN:
            raise ValueError(f"{shown(name)} is none of {', '.join(WITHIN)}")
        try:
            RULES["support"][name](each)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return dict(value)
