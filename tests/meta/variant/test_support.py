"""Supports: what they refuse, and by which name, in a problem and in tensors."""

from __future__ import annotations

from dataclasses import replace

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
from tests.harness.problem_tensors import INSIDE, NARROW, arguments
from verify.problem import Layout, Problem
from verify.variant import (
    MASK_KINDS,
    Support,
    Unsupported,
)

torch.set_num_threads(1)

# Support: the rules.


def test_what_is_inside_is_not_refused() -> None:
    assert NARROW.refusal(INSIDE) is None
    assert NARROW.refusal(INSIDE.but(mask=Causal(), seqlen_q=100, seqlen_kv=2)) is None


ONE_SIDED = {"masks": ("window",), "windows": "one_sided"}
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
    ({"softmax_scale": 0.0}, {"scales": "nonzero"}, "softmax_scale", "0 is not supported"),
    ({"score_mod": Softcap(20.0)}, {}, "softcap", "not supported"),
    ({"seqlen_q": 9}, {"seqlen_q_multiple": 8}, "seqlen_q", "9 is no multiple of 8"),
    ({"seqlen_kv": 9}, {"seqlen_kv_multiple": 8}, "seqlen_kv", "9 is no multiple of 8"),
    ({"seqlen_q": 10}, {"longer_q": False}, "seqlen_q", "10 is more than seqlen_kv, 9"),
    ({}, {"grouped_heads": "only"}, "heads_kv", "as many key heads as query heads, 2"),
    ({"mask": Window(2, 2)}, ONE_SIDED, "mask", "a window that is not one_sided"),
    ({"mask": Window(None, None)}, ONE_SIDED, "mask", "a window that is not one_sided"),
    ({"mask": Window(2, 1)}, ONE_SIDED | {"windows": "symmetric"}, "mask", "not symmetric"),
    ({"mask": Window(0, 1)}, ONE_SIDED | {"windows": "causal"}, "mask", "not causal"),
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
        "seqlen_q": {"min_seqlen": 0, "seqlen_q_multiple": 1, "longer_q": True},
        "seqlen_kv": {
            "min_seqlen": 0,
            "max_seqlen": None,
            "cross_lengths": True,
            "seqlen_kv_multiple": 1,
        },
        "mask": {"masks": tuple(MASK_KINDS), "intersections": True, "windows": "any"},
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


def test_windows_of_each_kind() -> None:
    accepted = {
        "any": {Window(2, 2), Window(2, 0), Window(2, None), Window(None, None)},
        "one_sided": {Window(2, None)},
        "symmetric": {Window(2, 2), Window(None, None)},
        "causal": {Window(2, 0)},
    }
    for kind, inside in accepted.items():
        support = replace(NARROW, masks=("window",), windows=kind)
        found = {mask for mask in accepted["any"] if not support.refusal(INSIDE.but(mask=mask))}
        assert found == inside


def test_a_longest_length_without_a_multiple_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"support.max_seqlen: 100 is less than 192, the first"):
        replace(NARROW, seqlen_q_multiple=64, seqlen_kv_multiple=48)
    assert replace(NARROW, seqlen_q_multiple=64).seqlen_q_multiple == 64


def test_an_unknown_word_in_a_support_is_an_error() -> None:
    for wrong, words in (
        ({"masks": ("causl",)}, "causl"),
        ({"scales": "all"}, "all"),
        ({"layouts": "dense"}, "dense"),
    ):
        with pytest.raises(ValueError, match=rf"support\..*{words}.* none of "):
            replace(NARROW, **wrong)


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
