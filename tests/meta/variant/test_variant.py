"""Declarations: what a support refuses and by which name, configs, and descriptions over JSON."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import fields, replace

import pytest
import torch

from references.masks import (
    Causal,
    Dense,
    Documents,
    Full,
    Lengths,
    Mask,
    Prefix,
    Window,
    intersect,
)
from references.score_mods import Softcap
from tests.harness.declared import flat_gradients, flat_numerics
from verify.problem import Layout, Problem
from verify.variant import (
    MASK_KINDS,
    AttentionArgs,
    Config,
    Contract,
    GradientNumerics,
    Numerics,
    Support,
    Unsupported,
    Variant,
    declaration_from,
)

torch.set_num_threads(1)

NARROW = Support(
    dtypes=("float16",),
    head_dims=(64, 128),
    masks=("full", "causal"),
    min_seqlen=2,
    max_seqlen=100,
    scales="default",
)
INSIDE = Problem(
    batch=2, heads_q=2, heads_kv=2, seqlen_q=8, seqlen_kv=9, head_dim=64, dtype="float16"
)


# Support: the rules.


def test_what_is_inside_is_not_refused() -> None:
    assert NARROW.refusal(INSIDE) is None
    assert NARROW.refusal(INSIDE.but(mask=Causal(), seqlen_q=100, seqlen_kv=2)) is None


REFUSED = [
    ({"dtype": "bfloat16"}, {}, "dtype", "bfloat16 is none of float16"),
    ({"head_dim": 65, "head_dim_v": 65}, {}, "head_dim", "65"),
    ({"head_dim_v": 65}, {"separate_head_dim_v": True}, "head_dim_v", "65 is not supported"),
    ({"head_dim_v": 128}, {}, "head_dim_v", "128 differs from head_dim 64"),
    ({"heads_q": 4}, {}, "heads_kv", "grouped"),
    ({"seqlen_q": 1}, {}, "seqlen_q", "1 is less than 2"),
    ({"seqlen_kv": 1}, {}, "seqlen_kv", "1 is less than 2"),
    ({"seqlen_kv": 101}, {}, "seqlen_kv", "more than 100"),
    ({"seqlen_q": 101}, {}, "seqlen_kv", "more than 100"),
    ({}, {"cross_lengths": False}, "seqlen_kv", "must equal seqlen_q"),
    ({"mask": Causal("tl")}, {}, "mask", "causal.tl"),
    ({"mask": Window(1, 1)}, {}, "mask", "window.1.1"),
    ({"mask": Causal()}, {"masks": ("full", "causal.square")}, "mask", "causal"),
    (
        {"mask": intersect(Causal(), Prefix(3))},
        {"masks": ("causal", "prefix")},
        "mask",
        "intersection",
    ),
    ({"mask": intersect(Causal(), Prefix(3))}, {"intersections": True}, "mask", "prefix"),
    ({"softmax_scale": 0.25}, {}, "softmax_scale", "head_dim ** -0.5"),
    ({"softmax_scale": 0.0}, {"scales": "positive"}, "softmax_scale", "not positive"),
    ({"softmax_scale": -0.125}, {"scales": "positive"}, "softmax_scale", "not positive"),
    ({"score_mod": Softcap(20.0)}, {}, "softcap", "not supported"),
]


@pytest.mark.parametrize(
    ("change", "support", "argument", "words"), REFUSED, ids=lambda value: str(value)[:40]
)
def test_each_rule_names_its_argument(
    change: dict, support: dict, argument: str, words: str
) -> None:
    refused = replace(NARROW, **support).refusal(INSIDE.but(**change))
    assert refused is not None
    assert refused[0] == argument
    assert words in refused[1]


def test_each_rule_yields_to_its_declaration() -> None:
    """The same problems, each inside the support that allows just that."""
    wider = {
        "dtype": {"dtypes": ("float16", "bfloat16")},
        "head_dim": {"head_dims": range(1, 257), "scales": "any"},
        "head_dim_v": {"head_dims": range(1, 257), "separate_head_dim_v": True},
        "heads_kv": {"grouped_heads": True},
        "seqlen_q": {"min_seqlen": 0},
        "seqlen_kv": {"min_seqlen": 0, "max_seqlen": None, "cross_lengths": True},
        "mask": {"masks": tuple(MASK_KINDS), "intersections": True},
        "softmax_scale": {"scales": "any"},
        "softcap": {"score_mods": ("softcap",)},
    }
    for change, support, argument, _ in REFUSED:
        assert replace(NARROW, **(support | wider[argument])).refusal(INSIDE.but(**change)) is None


MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "causal.tl": Causal("tl"),
    "window": Window(2, 0, "tl"),
    "lengths": Lengths((3, 8), (9, 0)),
    "documents": Documents((4, 5)),
    "prefix": Prefix(3),
    "dense": Dense(50, 1),
}


def test_every_mask_kind_allows_itself_and_nothing_else() -> None:
    assert set(MASKS) == set(MASK_KINDS) - {"causal.square"}
    for kind in MASKS:
        support = replace(NARROW, masks=(kind,))
        accepted = {
            name for name, mask in MASKS.items() if support.refusal(INSIDE.but(mask=mask)) is None
        }
        assert accepted == {kind}


def test_square_causal_is_either_alignment_where_lengths_are_equal() -> None:
    support = replace(NARROW, masks=("causal.square",))
    square = INSIDE.but(seqlen_q=9)
    for mask in (Causal("br"), Causal("tl")):
        assert support.refusal(square.but(mask=mask)) is None
        assert support.refusal(INSIDE.but(mask=mask)) is not None
    assert support.refusal(square) == ("mask", "full is not supported")


def test_an_unknown_word_in_a_support_is_an_error() -> None:
    for wrong, words in (
        ({"masks": ("causl",)}, "causl"),
        ({"scales": "all"}, "all"),
        ({"layouts": "dense"}, "dense"),
    ):
        with pytest.raises(ValueError, match=rf"support\..*{words}.* none of "):
            replace(NARROW, **wrong)


def test_rows_that_cannot_all_be_aligned_are_not_promised() -> None:
    for dtypes, dims in (
        (("float16",), range(16, 257)),
        (("float32", "bfloat16"), (64, 68)),
        (("float8_e4m3fn",), (64, 72)),
    ):
        with pytest.raises(
            ValueError,
            match=r"support\.head_dims: rows of (17|68|72) (float16|bfloat16|float8_e4m3fn) cannot",
        ):
            replace(ODD, support=Support(dtypes=dtypes, head_dims=dims, layouts="aligned"))
        replace(ODD, support=Support(dtypes=dtypes, head_dims=dims))
    replace(ODD, support=Support(dtypes=("float32",), head_dims=(64, 68), layouts="aligned"))


# Support.check, on tensors.


def arguments(problem: Problem) -> tuple[AttentionArgs, torch.Tensor]:
    """Tensors that lie as the problem says, in allocations that begin at a multiple of 512
    bytes."""

    def tensor(name: str) -> torch.Tensor:
        layout, shape = problem.layouts[name], problem.shapes[name]
        size = max(layout.extent(shape), 1) + layout.pitch
        whole = torch.zeros(size + 256, dtype=problem.format.torch)
        skip = -whole.data_ptr() % 512 // whole.itemsize
        return whole.as_strided(shape, layout.strides(shape), skip + layout.offset)

    q, k, v, out = (tensor(name) for name in ("q", "k", "v", "out"))
    return AttentionArgs(q, k, v, problem.mask, problem.scale, problem.score_mod, Config()), out


def refused(support: Support, problem: Problem) -> str | None:
    try:
        support.check(*arguments(problem))
    except Unsupported as refusal:
        return (
            refusal.argument
            if str(refusal) == f"{refusal.argument}: {refusal.reason}"
            else f"unreadable: {refusal}"
        )
    return None


def test_check_sees_in_tensors_what_refusal_sees_in_a_problem() -> None:
    for change, support, argument, _ in REFUSED:
        assert refused(replace(NARROW, **support), INSIDE.but(**change)) == argument
    assert refused(NARROW, INSIDE) is None


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize(
    ("layout", "any_", "aligned", "contiguous"),
    [
        (Layout(), True, True, True),
        (Layout(offset=8), True, True, True),  # where a tensor starts is no matter of strides
        (Layout("bshd"), True, True, False),
        (Layout(pitch=8), True, True, False),
        (Layout(pitch=1), True, False, False),
        (Layout(offset=1), True, False, True),
        (Layout("sbhd", pitch=4), True, False, False),
    ],
    ids=str,
)
def test_layouts(name: str, layout: Layout, any_: bool, aligned: bool, contiguous: bool) -> None:
    problem = INSIDE.but(**{f"layout_{name}": layout})
    for kind, accepted in (("any", any_), ("aligned", aligned), ("contiguous", contiguous)):
        assert refused(replace(NARROW, layouts=kind), problem) == (
            None if accepted else f"layout_{name}"
        )


def test_an_empty_or_single_row_tensor_is_always_aligned() -> None:
    support = replace(NARROW, layouts="aligned", min_seqlen=0)
    assert refused(support, INSIDE.but(seqlen_q=0, layout_q=Layout(pitch=1))) is None
    assert (
        refused(
            support,
            INSIDE.but(batch=1, heads_q=1, heads_kv=1, seqlen_q=1, layout_q=Layout(pitch=1)),
        )
        is None
    )


# Configs.


@pytest.mark.parametrize("present", list(itertools.product((False, True), repeat=4)))
@pytest.mark.parametrize(
    "options", [(), (("split", 4),), (("acc", "fp16"), ("swizzle", 128)), (("two_words", 3),)]
)
def test_config_names_parse_back(
    present: tuple[bool, ...], options: tuple[tuple[str, int | str], ...]
) -> None:
    names = ("block_m", "block_n", "num_warps", "num_stages")
    numbers = {
        name: value for name, value, has in zip(names, (128, 64, 4, 3), present, strict=True) if has
    }
    config = Config(**numbers, options=options)
    assert Config.parse(config.name) == config
    assert re.fullmatch(r"[a-z0-9_-]+", config.name)


def test_config_names_are_as_documented() -> None:
    assert Config(block_m=128, block_n=64, num_warps=4, num_stages=2).name == "m128n64w4s2"
    assert Config().name == "default"
    assert Config(options=(("split", 4),)).name == "default-split_4"


@pytest.mark.parametrize(
    "name",
    ["", "m", "m128x3", "x3", "128", "m1m2", "m-1", "default-", "m128-split", "m12 8", "M128"],
)
def test_what_is_no_config_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"not a config's name|unpack|not enough"):
        Config.parse(name)


# Descriptions.


def nothing(
    args: AttentionArgs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: dict[str, torch.Tensor],
) -> None:
    """No kernel at all."""


ODD = Variant(
    name="odd",
    family="triton",
    forward=nothing,
    configs=[Config(block_m=64, block_n=32), Config(options=(("split", 2), ("acc", "fp16")))],
    support=Support(
        dtypes=("float16", "bfloat16"),
        head_dims=range(16, 257, 8),
        masks=("full", "causal.square", "dense"),
        intersections=True,
        grouped_heads=True,
        separate_head_dim_v=True,
        cross_lengths=False,
        min_seqlen=0,
        max_seqlen=4096,
        scales="positive",
        score_mods=("softcap",),
        layouts="aligned",
        devices=("cuda",),
        capability=(9, 0),
        max_capability=(9, 9),
        dtypes_out=("float32",),
        descalings=("tensor", "head"),
        storages=("strided", "tiles"),
    ),
    numerics=flat_numerics(
        operands="float32",
        float32_products="tf32",
        prescale="sqrt",
        scores="input",
        probability="bfloat16",
        normalised=True,
        normaliser="lse",
        split_keys=True,
        exp="expf",
        block_n=0,
        softcap_tanh="tanh.approx",
        scale_roundings=3,
        probability_scale=256.0,
        promotion=128,
        output_roundings=1,
        score_accumulator="float16",
        rescale_exp="exp2f",
        maximum_lag=8.0,
        row_sum_of="rounded",
        row_sum_lanes=4,
        row_sum_apart=True,
        division="div.rn",
        accumulator="bfloat16",
        accumulator_rounded="block",
        values="input",
        maximum_rows=16,
        maximum_excess=1.0,
        maximum_step=0.5,
    ),
    gradients=flat_gradients(
        accumulator="bfloat16",
        score_accumulator="bfloat16",
        softmax_source="own",
        prescale="k",
        delta="input",
        delta_of="weights",
        score_gradient_of="rounded",
        score_gradient_scaled=True,
        atomics_dtype="input",
        operands="float32",
        float32_products="tf32",
        exp="expf",
        scale_roundings=3,
        softcap_tanh="tanh.approx",
        probability="float32",
        score_gradient_dtype="bfloat16",
        block_m=0,
        block_n=32,
        group="cast",
        atomics=("dq",),
        sums_roundings=2,
    ),
    backward=lambda *tensors: None,
    contract=Contract(
        lse="base2",
        empty_row_out=1.0,
        empty_row_lse=math.inf,
        deterministic=False,
        masked_values="any",
        nan="any",
        batch_invariant=True,
        deterministic_backward=False,
    ),
    workspace=lambda args: {},
    allocates_outputs=True,
    available=lambda: "not today",
    builds=lambda arch: (),
    compilable=lambda: "no compiler",
    head_dim_buckets=(64, 128, 256),
)


@pytest.mark.parametrize(
    "variant",
    [ODD, Variant(name="plain", family="torch", forward=nothing, support=NARROW)],
    ids=lambda v: v.name,
)
def test_a_description_survives_json(variant: Variant) -> None:
    data = json.loads(json.dumps(variant.describe()))
    found = declaration_from(data, ref="ref", path="/x.py", source_hash="abc")
    assert (found.ref, found.path, found.source_hash) == ("ref", "/x.py", "abc")
    assert found.support == replace(variant.support, head_dims=tuple(variant.support.head_dims))
    for name in (
        "name",
        "family",
        "numerics",
        "gradients",
        "contract",
        "allocates_outputs",
        "head_dim_buckets",
    ):
        assert getattr(found, name) == getattr(variant, name)
    assert found.configs == tuple(variant.configs)
    assert found.workspaces == (("forward", "saved") if variant.workspace is not None else ())
    assert found.unavailable == (variant.available() if variant.available else None)
    assert found.compiles is (variant.builds is not None)
    assert found.uncompilable == (variant.compilable() if variant.compilable else None)
    assert (found.undeclared, found.interpreted) == (False, False)
    assert found.config(found.configs[-1].name) == found.configs[-1]
    assert hash(found.support) == hash(found.support), "hashable: strategies are cached by it"
    with pytest.raises(KeyError):
        found.config("no-such-config")


def test_every_declared_field_is_tried_above() -> None:
    """A field added to a declaration must be added to ODD, or the round trip proves nothing of
    it."""
    for declared, plain in (
        (ODD.support, Support(dtypes=("float32",), head_dims=(1,))),
        (ODD.numerics, Numerics()),
        (ODD.contract, Contract()),
        (ODD.gradients, GradientNumerics()),
    ):
        same = [
            f.name for f in fields(declared) if getattr(declared, f.name) == getattr(plain, f.name)
        ]
        assert same == []


def test_not_a_number_is_a_possible_promise() -> None:
    variant = replace(ODD, contract=Contract(empty_row_out=math.nan, lse=None))
    found = declaration_from(
        json.loads(json.dumps(variant.describe())), ref="", path="", source_hash=""
    )
    assert math.isnan(found.contract.empty_row_out)
    assert found.contract.lse is None


def test_a_backward_names_what_saves_its_tensors() -> None:
    """Without a forward of its own it is judged by the numerics and the contract of the forward
    that it names."""
    saver = Variant(
        name="saver",
        family="torch",
        forward=nothing,
        support=NARROW,
        contract=Contract(lse="base2"),
    )
    alone = {
        "name": "alone",
        "family": "torch",
        "support": NARROW,
        "backward": nothing,
        "gradients": GradientNumerics(),
    }
    variant = Variant(**alone, saved_by=saver, contract=Contract(deterministic_backward=False))
    found = declaration_from(
        json.loads(json.dumps(variant.describe())), ref="", path="", source_hash=""
    )
    assert found.entries == ("backward",)
    assert (found.contract.lse, found.contract.deterministic_backward) == ("base2", False)
    assert found.saved_config == saver.configs[0]
    assert variant.entry("saved") == (nothing, None)
    assert variant.entry("backward") == (nothing, None)
    for wrong in ({"saved_by": None}, {"gradients": None}):
        with pytest.raises(ValueError, match="alone: "):
            Variant(**(alone | {"saved_by": saver} | wrong))
    with pytest.raises(ValueError, match="alone: "):
        Variant(name="alone", family="torch", support=NARROW)
