"""What a declaration may hold: each field has a rule, nonsense is one line that names the field,
what is honest passes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch

from verify.arithmetic.archs import arch_named
from verify.arithmetic.mma import provenance, unit_for
from verify.cell.process import ROOT
from verify.report import read
from verify.report.states import score_mods
from verify.variant import (
    Config,
    Contract,
    DeclarationError,
    GradientNumerics,
    GradientOrder,
    GradientProducts,
    GradientSoftmax,
    GradientSums,
    Maximum,
    Numerics,
    Order,
    Output,
    Products,
    Quantised,
    RowSum,
    ScoreGradient,
    Softmax,
    Support,
    Variant,
)
from verify.variant.numerics import leaves, rebuilt
from verify.variant.validation import RULES
from verify.variant.witness import Witness

SUPPORT: dict[str, Any] = {"dtypes": ("float16",), "head_dims": (64,)}
WITNESS: dict[str, Any] = {
    "case": "x:default:accuracy:sq=1",
    "tensor": "out",
    "r": 0.5,
    "device": "cpu",
    "date": "2026-11-22",
}
KINDS: tuple[type, ...] = (
    *(Config, Support, Contract, Numerics, Products, Softmax, Maximum, RowSum, Output, Order),
    Quantised,
    *(GradientNumerics, GradientProducts, GradientSoftmax, ScoreGradient, GradientSums),
    GradientOrder,
    Witness,
)
OWNERS: dict[str, tuple[type, dict[str, Any]]] = {
    kind.path: (kind, {Support: SUPPORT, Witness: WITNESS}.get(kind, {})) for kind in KINDS
}

NONSENSE: list[tuple[str, str, object, str]] = [
    ("numerics.softmax", "exp", "banana", "'banana' is none of ex2.approx, "),
    ("numerics.softmax", "exp", None, "None is none of"),
    ("numerics.softmax", "exp", ["expf"], "is none of"),
    ("numerics.softmax", "rescale_exp", "banana", "'banana' is none of"),
    ("numerics.output", "division", "div", "'div' is none of any, div.rn"),
    ("numerics.softmax", "softcap_tanh", "tanh", "'tanh' is none of tanhf, tanh.approx"),
    ("numerics.products", "operands", "float128", "'float128' is none of input, float64, float32"),
    (
        "numerics.products",
        "accumulator",
        "float64",
        "'float64' is none of float32, float16, bfloat16",
    ),
    ("numerics.products", "accumulator_rounded", "row", "'row' is none of product, block"),
    ("numerics.order", "head_dim", "groups", "'groups' is none of any, ascending"),
    ("numerics.output", "values", "float16", "'float16' is none of probability, input"),
    ("numerics.softmax.maximum", "rows", -1, "-1 is no whole number from 0 to 1048576 or None"),
    ("numerics.softmax.maximum", "excess", math.inf, "inf is no number from 0 to 126"),
    ("numerics.softmax.maximum", "step", 1.5, "1.5 is no number from 0 to 1"),
    ("gradients.products", "accumulator", "float16", "'float16' is none of float32, bfloat16"),
    ("gradients.score_gradient", "delta_of", "scores", "'scores' is none of output, weights"),
    ("numerics.softmax", "scale_roundings", 10**30, "is no whole number from 0 to 16"),
    ("numerics.softmax", "scale_roundings", -5, "-5 is no whole number from 0 to 16"),
    ("numerics.output", "roundings", 20000, "20000 is no whole number from 0 to 16"),
    ("numerics.output", "roundings", True, "True is no whole number"),
    ("numerics.output", "roundings", 1.0, "1.0 is no whole number"),
    ("numerics.softmax", "block_n", "64", "'64' is no whole number from 0 to 1048576 or None"),
    ("numerics.softmax.row_sum", "lanes", 0, "0 is no whole number from 1 to"),
    ("numerics.softmax.maximum", "lag", math.nan, "nan is no number from 0 to 126"),
    ("numerics.softmax.maximum", "lag", math.inf, "inf is no number from 0 to 126"),
    ("numerics.output", "probability_scale", 3.0, "3.0 is no power of two"),
    ("numerics.output", "probability_scale", 2.0**40, "is no number from"),
    ("numerics.products", "promotion", -1, "-1 is no whole number"),
    ("numerics.products", "promotion", "values", "'values' is none of block"),
    ("numerics.output", "normalised", "no", "'no' is neither True nor False"),
    ("gradients.softmax", "source", "mine", "'mine' is none of saved, own"),
    ("gradients.sums", "atomics", "dq", "'dq' is no tuple of names"),
    ("gradients.sums", "atomics", ("dq", "dx"), "'dx' is none of dq, dk, dv"),
    ("gradients.sums", "roundings", 17, "17 is no whole number from 0 to 16"),
    ("contract", "lse", "base10", "'base10' is none of natural, base2, None"),
    ("contract", "empty_row_out", "x", "'x' is no number"),
    ("contract", "empty_row_lse", None, "None is no number"),
    ("contract", "deterministic", 1, "1 is neither True nor False"),
    ("contract", "nan", "never", "'never' is none of propagates, out, any"),
    ("config", "block_n", "64", "'64' is no whole number from 1"),
    ("config", "block_m", 32.5, "32.5 is no whole number"),
    ("config", "num_warps", 0, "0 is no whole number from 1 to 32"),
    ("config", "options", "split", "'split' is no tuple of pairs"),
    ("config", "options", (("split", 1.5),), "is no pair of a name and a whole number or word"),
    ("support", "dtypes", "float16", "'float16' is no tuple of names out of"),
    ("support", "dtypes", ("float17",), "'float17' is none of float64, float32"),
    ("support", "dtypes", (torch.float16,), "torch.float16 is none of"),
    ("support", "dtypes", ("float16", "float16"), "names one twice"),
    ("support", "dtypes", (), "is empty; it takes 1 at least"),
    ("support", "head_dims", 64, "64 is no tuple of whole numbers"),
    ("support", "head_dims", (32.5,), "32.5 is no whole number from 1 to"),
    ("support", "head_dims", (0, 64), "0 is no whole number from 1"),
    ("support", "head_dims", range(1, 10**9), "999999999 is no whole number"),
    ("support", "head_dims", range(256, 16), "is empty"),
    ("support", "masks", ("causl",), "'causl' is none of full, causal, "),
    ("support", "scales", "all", "'all' is none of any, nonzero, positive, default"),
    ("support", "windows", "left", "'left' is none of any, one_sided, symmetric, causal"),
    ("support", "grouped_heads", "never", "'never' is none of only"),
    ("support", "longer_q", "no", "'no' is neither True nor False"),
    ("support", "seqlen_q_multiple", 0, "0 is no whole number from 1 to 4096"),
    ("support", "seqlen_kv_multiple", "64", "'64' is no whole number from 1 to 4096"),
    ("support", "layouts", "dense", "'dense' is none of any, aligned, contiguous"),
    ("support", "storages", ("Paged",), "'Paged' is no word of a storage, as 'strided'"),
    ("support", "storages", "strided", "'strided' is no tuple of words of storages"),
    ("support", "storages", (), "() is empty or names one twice"),
    ("support", "descalings", ("row",), "'row' is none of none, tensor, head"),
    ("support", "devices", ("tpu",), "'tpu' is none of cpu, cuda"),
    ("support", "score_mods", ("cap",), "'cap' is none of softcap"),
    ("support", "min_seqlen", -1, "-1 is no whole number"),
    ("support", "max_seqlen", 1e9, "1000000000.0 is no whole number"),
    ("support", "capability", (9,), "is no pair of whole numbers"),
    ("support", "capability", "sm_90", "'sm_90' is no tuple of two whole numbers"),
    ("support", "max_capability", (9, -1), "is no pair of whole numbers"),
]


@pytest.mark.parametrize(
    ("owner", "name", "value", "words"), NONSENSE, ids=lambda value: str(value)[:30]
)
def test_nonsense_is_one_line_that_names_its_field(
    owner: str, name: str, value: object, words: str
) -> None:
    kind, given = OWNERS[owner]
    with pytest.raises(DeclarationError) as refusal:
        kind(**(given | {name: value}))
    text = str(refusal.value)
    assert text.startswith(f"{owner}.{name}: ")
    assert words in text
    assert "\n" not in text
    assert isinstance(refusal.value, ValueError)


def test_the_least_is_no_more_than_the_most() -> None:
    with pytest.raises(DeclarationError, match=r"support.min_seqlen: 9 is more than max_seqlen, 8"):
        Support(**SUPPORT, min_seqlen=9, max_seqlen=8)
    with pytest.raises(DeclarationError, match=r"support.capability: \(9, 0\) is more than"):
        Support(**SUPPORT, capability=(9, 0), max_capability=(8, 9))
    assert Support(**SUPPORT, min_seqlen=8, max_seqlen=8, capability=(9, 0), max_capability=(9, 0))


def test_every_field_has_a_rule_and_every_rule_a_field() -> None:
    for owner, (kind, given) in OWNERS.items():
        parts = {each.name for each in fields(kind) if isinstance(each.default_factory, type)}
        ruled = set(RULES.get(owner, {}))
        assert {each.name for each in fields(kind)} == ruled | parts, owner
        assert not ruled & parts, owner
        assert kind(**given)  # what it holds unless told is legal
    assert set(RULES) <= set(OWNERS)


@pytest.mark.parametrize("owner", OWNERS)
def test_a_field_that_is_none_is_one_line_that_names_the_fields(owner: str) -> None:
    kind, given = OWNERS[owner]
    with pytest.raises(DeclarationError) as refusal:
        kind(**given, bogus=1)
    known = ", ".join(each.name for each in fields(kind))
    assert str(refusal.value) == f"{owner}.bogus: no such field; {owner} has {known}"


def test_a_part_is_what_its_field_takes() -> None:
    with pytest.raises(DeclarationError, match=r"^numerics\.products: .* is no Products$"):
        Numerics(products=Softmax())  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match=r"^gradients\.softmax: .* is no GradientSoftmax$"):
        GradientNumerics(softmax=Softmax())  # type: ignore[arg-type]


def test_no_part_has_more_than_eight_fields() -> None:
    for kind in set(KINDS) - {Config, Support, Contract}:
        assert len(fields(kind)) <= 8


@pytest.mark.parametrize("declared", [Numerics(), GradientNumerics()], ids=lambda one: one.path)
def test_a_declaration_is_rebuilt_from_its_data(declared: Numerics | GradientNumerics) -> None:
    data = json.loads(json.dumps(asdict(declared)))
    assert rebuilt(type(declared), data) == declared
    assert json.dumps(leaves(data)) == json.dumps(leaves(declared))
    with pytest.raises(DeclarationError, match=f"^{declared.path}.products.bogus: no such field"):
        rebuilt(type(declared), data | {"products": {"bogus": 1}})
    with pytest.raises(DeclarationError, match=f"^{declared.path}.products: 3 is no "):
        rebuilt(type(declared), data | {"products": 3})


def test_lists_are_taken_for_the_tuples_that_they_mean() -> None:
    support = Support(dtypes=["float16", "bfloat16"], head_dims=[64], masks=["full"])  # type: ignore[arg-type]
    assert (support.dtypes, support.head_dims, support.masks) == (
        ("float16", "bfloat16"),
        (64,),
        ("full",),
    )
    assert hash(support) == hash(replace(support, dtypes=("float16", "bfloat16")))
    assert Support(dtypes=("float16",), head_dims=range(16, 257)).head_dims == range(16, 257)
    assert Config(options=[["split", 4]]).options == (("split", 4),)  # type: ignore[arg-type,list-item]


PLAIN: dict[str, Any] = {
    "name": "x",
    "family": "torch",
    "forward": print,
    "support": Support(**SUPPORT),
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"numerics": {"exp": "expf"}}, "x: numerics: {'exp': 'expf'} is no Numerics"),
        ({"support": SUPPORT}, "x: support: "),
        ({"contract": None}, "x: contract: None is no Contract"),
        ({"configs": ["m64"]}, r"x: configs: \['m64'\] are not all a Config"),
        ({"forward": "forward"}, "x: forward: 'forward' is no function"),
        ({"name": 7}, "7: name: 7 is no str"),
        (
            {"support": Support(dtypes=("float64",), head_dims=(64,))},
            (
                "support.dtypes: 'float64' is none of float16, bfloat16, float32, float8_e4m3fn,"
                " float8_e5m2"
            ),
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_variant_is_made_of_the_parts_that_it_names(
    changes: dict[str, object], words: str
) -> None:
    assert Variant(**PLAIN)
    with pytest.raises(DeclarationError, match=words):
        Variant(**(PLAIN | changes))


def test_what_is_declared_in_reports_on_record_is_legal_still() -> None:
    for folder in sorted(path.parent for path in (ROOT / "reports").glob("*/report.json")):
        for variant in read(folder)["variants"]:
            assert rebuilt(Numerics, variant["numerics"])
            assert Contract(**variant["contract"])
            mods = {"score_mods": score_mods(variant["support"])}
            fields = {name: x for name, x in variant["support"].items() if name != "softcap"}
            assert Support(**(fields | mods))
            assert not variant["gradients"] or rebuilt(GradientNumerics, variant["gradients"])


def test_a_word_that_is_no_architecture_is_an_error() -> None:
    for word in ("banana", "", "sm_", "sm90", "SM_90", "cuda"):
        for operands in ("float16", "float32"):
            with pytest.raises(ValueError, match=f"arch: '{word}' is none of "):
                unit_for(word, operands)
    assert unit_for("sm_90a", "float16") == unit_for("sm_90", "float16")
    assert arch_named("sm_100a").listed
    assert not arch_named("sm_999").listed
    assert not provenance("sm_90a", "float16").guess
    assert provenance("sm_999", "float16").guess  # a generation that the tables do not know yet
