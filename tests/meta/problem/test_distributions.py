"""Every distribution keeps what its docstring promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from references.score_mods import Softcap
from verify.arithmetic.dtypes import DTYPES
from verify.problem import Problem, ProblemError, distributions
from verify.problem.distributions import DISTRIBUTIONS, ordinary, signs
from verify.problem.inputs import Inputs, dout, tensors
from verify.problem.known_answers import (
    GATHER_GAP,
    GATHERS,
    gather_gain,
    gather_possible,
    gather_targets,
)
from verify.problem.source import NORMAL, Table

SCALES = (None, 1.0, 0.01, 4.0, -0.125, 0.0, 1e-9)  # the last two allow no large logits
by_distribution = pytest.mark.parametrize("name", DISTRIBUTIONS)
by_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])


def problem(**changes: object) -> Problem:
    fields = {
        "batch": 2,
        "heads_q": 4,
        "heads_kv": 2,
        "seqlen_q": 70,
        "seqlen_kv": 130,
        "head_dim": 64,
        "dtype": "float16",
    }
    return Problem(**(fields | changes))  # type: ignore[arg-type]


def logits(case: Problem, inputs: Inputs) -> Tensor:
    """Scaled scores in float64, (batch, heads_q, seqlen_q, seqlen_kv)."""
    q = inputs.q.double().expand(case.shape_q)
    k = inputs.k.double().expand(case.shape_k).repeat_interleave(case.group, dim=1)
    return (q @ k.mT) * case.scale


def numbers(tensor: Tensor) -> set[float]:
    """The different numbers in a tensor."""
    return set(tensor.double().flatten().tolist())


def test_registry() -> None:
    assert ordinary()[0] == "normal"
    assert set(DISTRIBUTIONS) - set(ordinary()) == {
        "counting",
        "integer_scores",
        "dyadic",
        "octaves",
        *GATHERS,
    }
    assert all(30 < len(found.purpose) < 130 for found in DISTRIBUTIONS.values())
    with pytest.raises(ProblemError, match="distribution: 'gaussian' is none of normal, "):
        tensors(problem(distribution="gaussian"))


@by_distribution
@by_dtype
def test_everything_is_finite_and_shaped_as_stored(name: str, dtype: str) -> None:
    shapes: tuple[dict[str, int], ...] = (
        {},
        {"seqlen_q": 1},
        {"seqlen_kv": 1},
        {"seqlen_q": 0},
        {"seqlen_kv": 0},
        {"head_dim": 9, "head_dim_v": 1},
    )
    for shape, scale in [({}, scale) for scale in SCALES] + [(shape, None) for shape in shapes]:
        case = problem(
            distribution=name,
            dtype=dtype,
            softmax_scale=scale,
            **({"batch": 1, "seqlen_q": 33} | shape),
        )
        if name in GATHERS and gather_possible(case) is not None:
            continue
        inputs = tensors(case)
        for tensor, expected in (
            (inputs.q, case.shape_q),
            (inputs.k, case.shape_k),
            (inputs.v, case.shape_v),
        ):
            assert tuple(tensor.shape) == expected
            assert tensor.dtype is case.format.torch
            assert tensor.is_contiguous()
            assert tensor.isfinite().all()
        gradient = dout(case)
        assert tuple(gradient.shape) == case.shape_out
        assert gradient.isfinite().all()
        if name != "range_edges":
            # Raw scores stay finite in float32 too, for a kernel that scales them afterwards.
            assert (
                _largest(inputs.q) * _largest(inputs.k) * case.head_dim
                < torch.finfo(torch.float32).max
            )


@pytest.fixture(name="largest_draws")
def _largest_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of `normal` is the largest that it can be, of either sign."""
    cpu = torch.device("cpu")
    most = NORMAL.values(cpu).abs().max() * signs(torch.arange(65536))
    for table in [each for each in vars(distributions).values() if isinstance(each, Table)]:
        monkeypatch.setitem(table.__dict__, "_kept", {})
    NORMAL._kept[cpu, "values"] = most


@pytest.mark.usefixtures("largest_draws")
@by_distribution
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_draw_is_finite(name: str, dtype: str) -> None:
    """A campaign draws it once in 65,536 elements, a test of few problems never."""
    for scale in (None, 0.06, -1.94, 0.0, 2.0**-60):
        for seed in range(3):
            case = problem(
                distribution=name,
                dtype=dtype,
                softmax_scale=scale,
                seed=seed,
                batch=1,
                seqlen_q=9,
                seqlen_kv=13,
                head_dim=40,
            )
            if name in GATHERS and gather_possible(case) is not None:
                continue
            inputs = tensors(case)
            for tensor in (inputs.q, inputs.k, inputs.v, dout(case)):
                assert tensor.double().isfinite().all()


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


@by_distribution
def test_expanded_dimensions_are_stored_once(name: str) -> None:
    case = Problem.parse(problem(distribution=name).name + ",lq=bhsd.xb,lk=bhsd.xh,lv=bhsd.xbh")
    inputs = tensors(case)
    assert tuple(inputs.q.shape) == (1, 4, 70, 64)
    assert tuple(inputs.k.shape) == (2, 1, 130, 64)
    assert tuple(inputs.v.shape) == (1, 1, 130, 64)


@pytest.mark.parametrize("scale", SCALES[:5])
@by_dtype
def test_large_logits(dtype: str, scale: float | None) -> None:
    for head_dim in (16, 64, 256):
        case = problem(
            distribution="large_logits", dtype=dtype, softmax_scale=scale, head_dim=head_dim
        )
        assert 3e3 < logits(case, tensors(case)).abs().mean() < 2e4


@pytest.mark.parametrize("scale", SCALES[:5])
@by_dtype
def test_negative_lse(dtype: str, scale: float | None) -> None:
    for head_dim in (16, 64, 256):
        case = problem(
            distribution="negative_lse", dtype=dtype, softmax_scale=scale, head_dim=head_dim
        )
        found = logits(case, tensors(case))
        lse = found.logsumexp(-1)
        assert found.max() < 0
        near = torch.arange(case.seqlen_q) % 8 == 0
        assert ((lse[..., near] > -120) & (lse[..., near] < -70)).all()
        assert ((lse[..., ~near] > -1100) & (lse[..., ~near] < -850)).all()


@by_dtype
def test_below_sentinel(dtype: str) -> None:
    case = problem(distribution="below_sentinel", dtype=dtype)
    assert logits(case, tensors(case)).max() < -1e5


@by_dtype
def test_ties(dtype: str) -> None:
    case = problem(distribution="tied_maxima", dtype=dtype)
    inputs = tensors(case)
    keys = inputs.k[0, 0].tolist()
    winner = logits(case, inputs)[0, 0].argmax(-1).tolist()
    assert all(sum(key == keys[j] for key in keys) >= 4 for j in winner)
    assert inputs.v.max() < 0
    equal = tensors(case.but(distribution="equal_rows")).k
    assert (equal == equal[:, :, :1]).all()
    assert (equal[0, 0, 0] != equal[1, 0, 0]).any()


@pytest.mark.parametrize("scale", SCALES[:5])
@by_dtype
def test_increasing_and_decreasing(dtype: str, scale: float | None) -> None:
    for head_dim in (16, 33, 64):
        case = problem(
            distribution="increasing",
            dtype=dtype,
            softmax_scale=scale,
            head_dim=head_dim,
            seqlen_kv=1000,
        )
        growth = logits(case, tensors(case)).diff(dim=-1)
        assert growth.min() > 0.24
        assert growth.max() < 0.88
        shrinking = logits(case, tensors(case.but(distribution="decreasing"))).diff(dim=-1)
        assert shrinking.max() < -0.24


@pytest.mark.parametrize("scale", SCALES[:5])
@by_dtype
def test_sink(dtype: str, scale: float | None) -> None:
    first = set()
    for seed in range(6):
        case = problem(distribution="sink", dtype=dtype, softmax_scale=scale, seed=seed)
        if abs(case.scale) > 0.5:
            continue  # other keys' logits grow with the scale, the sink's does not
        top = logits(case, tensors(case)).topk(2, dim=-1)
        assert (top.values[..., 0] - top.values[..., 1]).min() > 20
        assert (top.indices[..., :1, 0] == top.indices[..., 0]).all()
        first |= set((top.indices[..., 0] == 0).flatten().tolist())
    assert first == {True, False} or abs(scale or 0) > 0.5


def test_values_of_v() -> None:
    found = {name: tensors(problem(distribution=name)).v.double() for name in ordinary()}
    assert found["same_sign_v"].min() > 0
    mean = found["v_mean"].mean(dim=2)
    assert mean.min() > 0.5
    assert mean.max() > 60
    assert (found["ones_v"] == 1).all()
    assert (found["one_hot_v"].sum(-1) == 1).all()
    assert (found["zero_v_columns"][..., ::4] == 0).all()
    assert (found["zero_v_columns"][..., 1::4] != 0).any()


def test_small_integers_outliers_and_rank() -> None:
    inputs = tensors(problem(distribution="small_integers"))
    for tensor in (inputs.q, inputs.k, inputs.v):
        assert numbers(tensor) == {-2.0, -1.0, 0.0, 1.0, 2.0}
        assert 0.78 < (tensor == 0).double().mean() < 0.82
    assert numbers(dout(problem(distribution="small_integers"))) == {-2.0, -1.0, 0.0, 1.0, 2.0}
    outlying = tensors(problem(distribution="outliers", dtype="float32", seqlen_q=2000)).q
    assert 0.0004 < (outlying.abs() > 5).double().mean() < 0.0012
    ranks = set()
    for seed in range(12):
        inputs = tensors(problem(distribution="low_rank", dtype="float32", seed=seed))
        ranks.add(int(torch.linalg.matrix_rank(inputs.k[1, 1].double())))
        assert (
            int(torch.linalg.matrix_rank(torch.cat([inputs.q[0, 0], inputs.q[1, 3]]).double())) <= 4
        )
    assert ranks == {2, 3, 4}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_subnormals(dtype: str) -> None:
    case = problem(distribution="subnormals", dtype=dtype)
    inputs = tensors(case)
    smallest_normal = 2.0**case.format.emin
    for tensor in (inputs.q, inputs.k, inputs.v):
        tiny = (tensor.double().abs() < smallest_normal) & (tensor != 0)
        assert 0.3 < tiny.double().mean() < 0.7
    if dtype == "float16":
        flushed = Inputs(
            *(
                torch.where(t.double().abs() < smallest_normal, 0, t)
                for t in (inputs.q, inputs.k, inputs.v)
            )
        )
        assert (logits(case, flushed) - logits(case, inputs)).abs().mean() > 0.05
        assert (inputs.v[..., ::4].double().abs() < smallest_normal).all()


# The two that an oracle reads


def test_counting() -> None:
    case = problem(distribution="counting", head_dim_v=24)
    inputs = tensors(case)
    assert (inputs.q == 0).all()
    assert (inputs.k != 0).any()
    assert (inputs.v[..., 0] == 1).all()
    keys, column = torch.arange(130)[:, None], torch.arange(1, 24)
    assert torch.equal(
        inputs.v[..., 1:], (keys % 23 == column - 1).to(torch.float16).expand(2, 2, 130, 23)
    )
    assert (tensors(problem(distribution="counting", head_dim_v=1)).v == 1).all()


MASKS = (
    "full",
    "causal",
    "causal.tl",
    "window.3.2",
    "lengths.70_0.130_7",
    "documents.5_8_117",
    "dense.5.3",
    "causal+dense.10.1",
)


@pytest.mark.parametrize("mask", MASKS)
def test_gather_targets_are_visible(mask: str) -> None:
    case = Problem.parse(problem(distribution="gather").name + f",mask={mask}")
    targets = gather_targets(case)
    seen = case.mask.dense(2, 4, 70, 130)
    assert targets.dtype is torch.int64
    assert tuple(targets.shape) == (2, 4, 70)
    assert torch.equal(targets < 0, ~seen.any(-1))
    assert seen.gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets >= 0].all()
    if mask == "full":
        assert len(numbers(targets)) > 100


@pytest.mark.parametrize("scale", SCALES[:5])
@by_dtype
def test_gather_leaves_one_key(dtype: str, scale: float | None) -> None:
    for head_dim, seqlen_kv, layout in (
        (64, 130, ""),
        (9, 300, ""),
        (8, 256, ",lk=bhsd.xh"),
        (40, 1, ""),
        (16, 77, ",lq=bhsd.xbh"),
    ):
        shape = problem(
            distribution="gather",
            dtype=dtype,
            softmax_scale=scale,
            head_dim=head_dim,
            seqlen_kv=seqlen_kv,
        )
        case = Problem.parse(shape.name + layout)
        if scale == 0.01 and dtype == "float16" and head_dim < 16:
            continue  # the gain may exceed float16
        assert gather_possible(case) is None
        inputs = tensors(case)
        gain = gather_gain(case)
        assert math.frexp(gain)[0] * 8 % 1 == 0
        assert numbers(inputs.k.abs()) == {1.0}
        assert numbers(inputs.q.abs()) == {gain}
        assert len({tuple(key) for key in inputs.k[0, 0].tolist()}) == seqlen_kv
        found = logits(case, inputs) / math.log(2)
        targets = gather_targets(case)
        best = found.gather(-1, targets[..., None])
        assert (best > 0).all()
        others = found.scatter(-1, targets[..., None], -math.inf)
        assert (best - others).min() >= GATHER_GAP
        if gain > 2 * 2.0**case.format.emin:  # as small as three bits allow
            assert (best - others).min() <= GATHER_GAP * 1.25 or seqlen_kv == 1 or head_dim > 16


def test_gather_keys_differ_between_heads() -> None:
    """So that a query which reads another head's keys selects another value."""
    k = tensors(problem(distribution="gather")).k
    assert (k[0, 0] != k[0, 1]).any(-1).all()
    assert (k[0, 0] != k[1, 0]).any(-1).all()


def test_gather_values_look_unlike_each_other() -> None:
    v = tensors(problem(distribution="gather", dtype="bfloat16")).v
    assert torch.equal(
        v, tensors(problem(distribution="gather", dtype="float32")).v.to(torch.bfloat16)
    )
    assert v.double().abs().min() >= 2.0**-6
    assert v.double().abs().max() < 2.0**7
    assert len({tuple(row) for row in v.flatten(0, 2).tolist()}) == 2 * 2 * 130


def test_gather_says_why_it_is_impossible() -> None:
    assert "softcap" in str(gather_possible(problem(score_mod=Softcap(20.0))))
    assert "head_dim" in str(gather_possible(problem(head_dim=7)))
    assert "softmax_scale" in str(gather_possible(problem(softmax_scale=0.0)))
    assert "softmax_scale" in str(gather_possible(problem(softmax_scale=1e-5)))
    assert gather_possible(problem(softmax_scale=1e-5, dtype="bfloat16")) is None
    case = Problem.parse(problem().name + ",lq=bhsd.xb,mask=lengths.70_70.130_7")
    assert "layout_q" in str(gather_possible(case))
    with pytest.raises(ProblemError, match="softcap"):
        tensors(problem(score_mod=Softcap(20.0), distribution="gather"))
