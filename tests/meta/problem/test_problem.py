"""Problems, layouts and cases: names parse back, nonsense is refused by name, strides are torch's
own."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references.masks import GALLERY, Causal, Full, Lengths, Mask, Window, intersect
from references.score_mods import Softcap
from verify.arithmetic.dtypes import DTYPES
from verify.cell.arena import plan
from verify.problem import ORDERS, Layout, Problem, ProblemError
from verify.problem.case import Case, CaseError, replay_command
from verify.problem.inputs import tensors
from verify.problem.storage import Piece
from verify.problem.strategies import LIMITS, problems
from verify.variant import MASK_KINDS, Config, Contract, Declaration, Numerics, Support

torch.set_num_threads(1)

EVERYTHING = Declaration(
    ref="everything",
    path="everything.py",
    source_hash="",
    name="everything",
    family="torch",
    configs=(Config(),),
    support=Support(
        dtypes=("float16", "bfloat16", "float32", "float64"),
        head_dims=range(1, 257),
        masks=tuple(kind for kind in MASK_KINDS if kind != "causal.square"),
        intersections=True,
        grouped_heads=True,
        separate_head_dim_v=True,
        min_seqlen=0,
        score_mods=("softcap",),
    ),
    numerics=Numerics(),
    contract=Contract(),
)
drawn = st.sampled_from(EVERYTHING.support.dtypes).flatmap(
    lambda dtype: problems(EVERYTHING, dtype=dtype, limits=LIMITS["interpreter"])
)
layouts = st.builds(
    Layout,
    st.sampled_from(ORDERS),
    st.sampled_from((0, 1, 3, 8)),
    st.sampled_from((0, 1, 8)),
    st.sampled_from(("", "b", "h", "bh")),
)
finite = st.floats(allow_nan=False, allow_infinity=False, width=64)
scales = finite.filter(lambda x: x == 0 or abs(x) >= 2.0**-126).filter(
    lambda x: abs(x) <= DTYPES["float32"].max
)
SMALL = Problem(
    batch=2, heads_q=4, heads_kv=2, seqlen_q=5, seqlen_kv=7, head_dim=8, dtype="float16"
)
quick = settings(max_examples=60, deadline=None, database=None)


# Names.


@quick
@given(drawn)
def test_a_drawn_problem_parses_back_from_its_name(problem: Problem) -> None:
    assert Problem.parse(problem.name) == problem
    assert Problem.parse(problem.name).name == problem.name
    assert shlex.quote(problem.name) == problem.name


@quick
@given(
    scales,
    st.none() | st.floats(1e-300, 1e300).map(Softcap),
    st.sampled_from(sorted(DTYPES)),
    layouts,
    layouts,
    st.sampled_from(GALLERY),
)
def test_any_scale_score_mod_layout_and_mask_parses_back(
    scale: float,
    score_mod: Softcap | None,
    dtype: str,
    layout_q: Layout,
    layout_out: Layout,
    mask: Mask,
) -> None:
    out = replace(layout_out, expand="")
    problem = Problem(
        seqlen_q=3,
        seqlen_kv=4,
        head_dim=16,
        dtype=dtype,
        mask=mask,
        softmax_scale=scale,
        score_mod=score_mod,
        layout_q=layout_q,
        layout_out=out,
    )
    again = Problem.parse(problem.name)
    assert again == problem
    assert math.copysign(1, again.scale) == math.copysign(1, scale) or scale == 0


def test_defaults_are_left_out_of_a_name() -> None:
    assert (
        Problem(seqlen_q=3, seqlen_kv=4, head_dim=16, dtype="float16").name
        == "sq=3,skv=4,d=16,dtype=float16"
    )
    assert Problem(
        seqlen_q=3, seqlen_kv=4, head_dim=16, head_dim_v=16, softmax_scale=0.25, dtype="float16"
    ).name.endswith("float16")
    # head_dim_v and the scale follow head_dim only where they were left to it.
    problem = Problem.parse("sq=3,skv=4,d=64,dtype=float16")
    assert (problem.head_dim_v, problem.scale) == (64, 0.125)


def test_but_changes_only_what_it_is_told() -> None:
    changed = SMALL.but(seqlen_q=9)
    assert (changed.seqlen_q, changed.but(seqlen_q=5)) == (9, SMALL)
    # The scale is a number by then: a longer head does not change it.
    assert SMALL.but(head_dim=64).scale == SMALL.scale


# Nonsense.

WHOLE = {"sq": "8", "skv": "8", "d": "64", "dtype": "float16"}


def spelled(**changes: str) -> str:
    return ",".join(f"{key}={value}" for key, value in (WHOLE | changes).items())


BAD_TEXT = {
    "": "not a field of a problem",
    "sq": "'sq' is not a field",
    "sq=8,skv=8": "head_dim",
    "skv=8,d=64,dtype=float16": "seqlen_q",
    "sq=8,skv=8,d=64": "dtype",
    spelled() + ",sq=9": "'sq=9' is not a field",  # twice
    spelled() + ",": "'' is not a field",
    spelled(seqlen="3"): "'seqlen=3' is not a field",
    spelled(SQ="3"): "'SQ=3' is not a field",
    spelled(sq="eight"): "sq: 'eight' does not parse",
    spelled(sq=""): "sq: '' does not parse",
    spelled(sq="8.0"): "sq: '8.0' does not parse",
    spelled(sq="-1"): "seqlen_q: -1 is negative",
    spelled(skv="-1"): "seqlen_kv: -1 is negative",
    spelled(b="0"): "batch: 0 is less than 1",
    spelled(hq="0"): "heads_q: 0 is less than 1",
    spelled(hkv="0"): "heads_kv: 0 is less than 1",
    spelled(hq="3", hkv="2"): "heads_q: 3 is no multiple of heads_kv = 2",
    spelled(d="0"): "head_dim: 0 is less than 1",
    spelled(d="-2"): "head_dim: -2 is less than 1",
    spelled(dv="-2"): "head_dim_v: -2 is less than 1",
    spelled(dtype="float17"): "dtype: 'float17' is none of",
    spelled(scale="inf"): "softmax_scale: inf is not finite",
    spelled(scale="nan"): "softmax_scale: nan is not finite",
    spelled(scale="1e-44"): "softmax_scale: 1e-44 is below fp32's normal range",
    spelled(scale="big"): "scale: 'big' does not parse",
    spelled(softcap="-1"): "softcap: '-1' does not parse (softcap: -1.0 is not positive)",
    spelled(softcap="nan"): "softcap: 'nan' does not parse (softcap: nan is not finite)",
    spelled(softcap="inf"): "softcap: 'inf' does not parse (softcap: inf is not finite)",
    spelled(seed="-1"): "seed: -1 is negative",
    spelled(mask="causul"): "mask: 'causul' does not parse",
    spelled(mask="window.3"): "mask: 'window.3' does not parse",
    spelled(mask="lengths.8_8.8_8"): "mask: lengths.8_8.8_8 gives 2 lengths for a batch of 1",
    spelled(mask="causal+lengths.8_8.8_8"): "2 lengths for a batch of 1",
    spelled(lq="dshb"): "lq: 'dshb' does not parse (layout: order 'dshb'",
    spelled(lk="bhsd.y3"): "lk: 'bhsd.y3' does not parse",
    spelled(lk="bhsd.p8.p8"): "lk: 'bhsd.p8.p8' does not parse",
    spelled(lk="bhsd.p"): "lk: 'bhsd.p' does not parse",
    spelled(lv="bhsd.p-8"): "lv: 'bhsd.p-8' does not parse (layout: pitch",
    spelled(lv="bhsd.xs"): "lv: 'bhsd.xs' does not parse (layout: expand",
    spelled(lo="bhsd.xh"): "layout_out: an output cannot be expanded",
}


@pytest.mark.parametrize("text", BAD_TEXT)
def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(ProblemError) as caught:
        Problem.parse(text)
    assert BAD_TEXT[text] in str(caught.value)
    with pytest.raises(CaseError) as caught_case:
        Case.parse(f"kernel:default:accuracy:{text or ' '}")
    assert BAD_TEXT[text] in str(caught_case.value) or not text


@quick
@given(st.text(alphabet="sqkvdtype=float16,.bh_+-0123456789xpo", max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    for candidate in (
        text,
        spelled(mask=text),
        spelled(lq=text),
        spelled(scale=text),
        spelled(sq=text),
    ):
        try:
            problem = Problem.parse(candidate)
        except ProblemError:
            continue
        assert Problem.parse(problem.name) == problem


# Shapes and lengths.


def test_shapes() -> None:
    problem = SMALL.but(head_dim_v=3)
    assert problem.shapes == {
        "q": (2, 4, 5, 8),
        "k": (2, 2, 7, 8),
        "v": (2, 2, 7, 3),
    } | dict.fromkeys(("out", "dout"), (2, 4, 5, 3))
    assert (problem.group, problem.pairs) == (2, 2 * 4 * 5 * 7)


def test_kv_lengths_are_the_least_of_all_that_a_mask_says() -> None:
    assert SMALL.kv_lengths() == (7, 7)
    assert SMALL.but(mask=Lengths((5, 5), (3, 9))).kv_lengths() == (3, 7)
    both = intersect(Causal(), Lengths((5, 5), (3, 0)), Lengths((1, 5), (4, 6)), Window(1, 1))
    assert SMALL.but(mask=both).kv_lengths() == (3, 0)
    assert SMALL.but(mask=Full()).kv_lengths() == (7, 7)


# Layouts, against torch's own idea of memory.

SHAPES = ((2, 3, 5, 4), (1, 1, 1, 1), (3, 1, 2, 8), (1, 4, 0, 8), (2, 2, 7, 1))


def _stored(layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """That layout by torch's own means: allocate in storage order, cut the pitch off, permute,
    expand."""
    sizes = dict(zip("bhsd", shape, strict=True))
    kept = [1 if dim in layout.expand else sizes[dim] for dim in layout.order]
    whole = torch.zeros(*kept[:-1], kept[-1] + layout.pitch)[..., : kept[-1]]
    return whole.permute([layout.order.index(dim) for dim in "bhsd"]).expand(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "layout",
    [Layout(o, p, 1, x) for o, p, x in product(ORDERS, (0, 3), ("", "b", "h", "bh"))],
    ids=lambda n: n.name,
)
def test_strides_are_torchs(layout: Layout, shape: tuple[int, int, int, int]) -> None:
    ours, theirs = layout.strides(shape), _stored(layout, shape).stride()
    for dim, size in enumerate(shape):
        # a stride along one element, or in an empty tensor, can be any number
        if size > 1 and 0 not in shape:
            assert ours[dim] == theirs[dim]


@quick
@given(
    layouts, st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.integers(1, 5))
)
def test_a_layout_stays_in_its_extent_and_overlaps_only_where_expanded(
    layout: Layout, shape: tuple[int, int, int, int]
) -> None:
    extent, strides = layout.extent(shape), layout.strides(shape)
    storage = torch.arange(extent)
    view = storage.as_strided(shape, strides, layout.offset)  # raises if out of bounds
    if 0 in shape:
        assert extent == layout.offset
        return
    assert int(view.min()) == layout.offset
    assert int(view.max()) == extent - 1, "the extent ends behind the last element"
    copies = math.prod(
        size for size, dim in zip(shape, "bhsd", strict=True) if dim in layout.expand
    )
    assert len(view.unique()) * copies == view.numel()
    assert strides[3] == 1


def test_layout_names() -> None:
    for layout in (
        Layout(o, p, f, x) for o, p, f, x in product(ORDERS, (0, 8), (0, 1), ("", "b", "bh"))
    ):
        assert Layout.parse(layout.name) == layout
    assert Layout.parse("bshd.p8.o1.xh") == Layout("bshd", 8, 1, "h")
    assert Layout().name == "bhsd"


@pytest.mark.parametrize(
    ("layout", "itemsize", "expected"),
    [
        (Layout(), 2, True),
        (Layout(offset=8), 2, True),
        (Layout(offset=1), 2, False),
        (Layout(pitch=8), 2, True),
        (Layout(pitch=1), 2, False),
        (Layout(pitch=4), 4, True),
        (Layout(offset=2), 4, False),
        (Layout("sbhd", expand="bh"), 2, True),
    ],
)
def test_alignment_is_of_the_rows_in_memory(layout: Layout, itemsize: int, expected: bool) -> None:
    shape = (2, 3, 5, 8)
    assert layout.aligned(shape, itemsize, 16) is expected
    strides = layout.strides(shape)
    places = [
        layout.offset + b * strides[0] + h * strides[1] + s * strides[2]
        for b, h, s in product(range(2), range(3), range(5))
    ]
    assert all(place * itemsize % 16 == 0 for place in places) is expected


def test_a_single_row_needs_no_aligned_pitch() -> None:
    assert Layout(pitch=1).aligned((1, 1, 1, 8), 2, 16)
    assert Layout(offset=1).aligned((1, 1, 0, 8), 2, 16)


@quick
@given(drawn)
def test_every_drawn_layout_fits_its_slot(problem: Problem) -> None:
    where = plan(problem, lse=True, workspace={})
    arena = torch.zeros(where.size, dtype=torch.uint8)
    for name in ("q", "k", "v", "out"):
        slot, layout = where[name], problem.layouts[name]
        view = slot.view(arena)
        assert tuple(view.shape) == problem.shapes[name]
        assert slot.begin <= slot.start <= slot.end <= where.size
        aligned = [n for n, size in zip(view.stride()[:3], view.shape[:3], strict=True) if size > 1]
        rows = all(n * view.itemsize % 16 == 0 for n in aligned) and slot.start % 16 == 0
        assert rows is layout.aligned(problem.shapes[name], view.itemsize, 16) or not view.numel()


def test_contiguous_strides() -> None:
    for shape in ((2, 3, 4), (1,), (), (2, 0, 3)):
        assert Piece.packed(shape).strides == torch.empty(shape).stride()


# Cases.


@quick
@given(
    drawn,
    st.sampled_from(("kernel", "kernels/a.py@my-kernel", "/tmp/x_1.py@flash", "C:/x.py@a")),
    st.sampled_from(("default", "m128n64w4s2", "n32-acc_16")),
)
def test_case_ids_round_trip_and_need_no_quotes(
    problem: Problem, variant: str, config: str
) -> None:
    case = Case(variant, config, "accuracy", problem)
    assert Case.parse(case.id) == case
    assert Case.parse(f"  {case.id}\n") == case
    assert shlex.quote(case.id) == case.id
    assert "\n" not in case.id


@pytest.mark.parametrize(
    "text", ["", "a", "a:b", "a:b:c", ":::", "a:b:c:", ":b:c:sq=1,skv=1,d=8,dtype=float16"]
)
def test_an_incomplete_id_is_refused(text: str) -> None:
    with pytest.raises(CaseError, match="is not a case id"):
        Case.parse(text)


def test_a_replay_command_is_the_case_and_nothing_else() -> None:
    case = Case("my.py@kernel", "n32", "gather", SMALL.but(distribution="gather", seed=2**32 - 1))
    words = shlex.split(replay_command(case.id))
    assert words[:-1] == ["python", "-m", "verify", "replay"]
    again = Case.parse(words[-1])
    assert again == case
    for one, other in zip(
        tensors(case.problem).named.values(), tensors(again.problem).named.values(), strict=True
    ):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_a_name_is_made_once_and_is_of_its_own_problem() -> None:
    problem = Problem.parse("sq=5,skv=7,d=8,dtype=float16,seed=3")
    assert problem.name is problem.name
    other = problem.but(seed=4)
    assert other.name == problem.name.replace("seed=3", "seed=4")
    assert Problem.parse(problem.name) == problem
    assert hash(problem) == hash(problem.but(seed=3))
