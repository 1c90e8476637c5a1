"""Truths of many cases at once are those of each case alone, whatever the other cases are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Dense, Documents, Full, Lengths, Window, intersect
from references.quantisation import parse_quantisation
from references.score_mods import Softcap
from tests.harness.judge_devices import ARCHS, CONFIG, FORWARDS
from tests.harness.stacks import neighbours
from verify.judging import stacked, truth
from verify.judging.stacked import Asked, answer, apart, excludes, together
from verify.judging.truth import Truth, compute_truth
from verify.problem import Problem
from verify.problem.inputs import dequantised, tensors
from verify.tolerance import forward
from verify.variant import Maximum, Numerics, Products, Softmax

torch.set_num_threads(1)

BASE = Problem(
    heads_q=4, heads_kv=2, seqlen_q=37, seqlen_kv=70, head_dim=24, dtype="float16", mask=Causal()
)
# Values that overflow, underflow or are peaked stand beside ordinary ones.
VALUES = ("normal", "large_logits", "subnormals", "range_edges", "outliers", "below_sentinel")
SHAPES = (
    BASE,
    BASE.but(mask=Full(), seqlen_q=3, seqlen_kv=300),
    BASE.but(mask=Window(16, 0), dtype="bfloat16", softmax_scale=-4.0),
    BASE.but(mask=intersect(Causal(), Window(20, 5)), dtype="float32"),
    BASE.but(mask=Documents((5, 0, 30)), score_mod=Softcap(3.0)),
    BASE.but(softmax_scale=2.0**118),
    BASE.but(softmax_scale=0.0, mask=Full()),
    BASE.but(batch=2, mask=intersect(Causal(), Lengths((9, 37), (20, 60)))),
    BASE.but(batch=2, mask=intersect(Causal(), Dense(40, 7))),
)
NUMERICS = FORWARDS | {
    "shared maximum": Numerics(softmax=Softmax(maximum=Maximum(rows=None))),
    "narrow": Numerics(products=Products(accumulator="float16"), softmax=Softmax(scores="input")),
}


def asked_of(problems: Sequence[Problem], numerics: Numerics, arch: str = "sm_90") -> list[Asked]:
    return [
        Asked(p, dequantised(p, tensors(p)), [[forward.resolve(numerics, CONFIG, p, arch)]])
        for p in problems
    ]


def differences(case: Asked) -> Iterator[str]:
    """What a case's answers have that its truth alone has not, beyond fp64's roundings."""
    for question, found in zip(case.questions, case.answers, strict=True):
        alone = compute_truth(case.problem, case.inputs, list(question))
        for name, mine, other in _pairs(found.truth, alone):
            if not torch.allclose(mine, other, rtol=1e-11, atol=0.0, equal_nan=True):
                yield f"{name} of {case.problem.name}"


def _pairs(mine: Truth, other: Truth) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name in (f.name for f in fields(mine)):
        both = getattr(mine, name), getattr(other, name)
        assert (both[0] is None) == (both[1] is None), name
        if isinstance(both[0], Tensor):
            yield name, *both
        elif both[0] is not None:
            yield f"middle of {name}", both[0].middle, both[1].middle
            yield f"reach of {name}", both[0].reach, both[1].reach


@pytest.mark.first_look(2)
@pytest.mark.parametrize("name", NUMERICS)
def test_a_stack_says_of_each_case_what_it_says_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stacked._MOST, "cpu", 1 << 20)
    answered = 0
    for number, shape in enumerate(SHAPES):
        arch = ARCHS[number % len(ARCHS)] if name != "narrow" else "sm_90"
        try:
            cases = asked_of(neighbours(shape, VALUES), NUMERICS[name], arch)
        except ValueError:  # no bound is derived for this arithmetic beside this feature
            continue
        answered += answer(cases)
        for case in cases:
            assert not list(differences(case))
    assert answered >= 4 * len(VALUES)


def test_a_mix_up_of_two_cases_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(whole: Truth, counts: Sequence[int]) -> Iterator[Truth]:
        return iter(list(apart(whole, counts))[::-1])

    def shifted(whole: Truth, counts: Sequence[int]) -> Iterator[Truth]:
        moved = {f.name: getattr(whole, f.name) for f in fields(whole)}
        moved |= {"out": whole.out.roll(1, 0)}
        return apart(Truth(**moved), counts)

    plants: tuple[Callable[[Truth, Sequence[int]], Iterator[Truth]], ...] = (swapped, shifted)
    for plant in plants:
        monkeypatch.setattr(stacked, "apart", plant)
        cases = asked_of([BASE.but(seed=n) for n in range(4)], Numerics())
        assert answer(cases) == 4
        assert all(list(differences(case)) for case in cases)


def test_the_mask_of_another_sequence_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = BASE.but(batch=2, mask=Lengths((37, 20), (70, 30)))
    cases = asked_of([shape.but(seed=n) for n in range(3)], Numerics())

    def runs(
        mask: stacked.Repeated, seqlen_q: int, seqlen_kv: int, device: str = "cpu"
    ) -> Callable[..., Tensor]:
        own = mask.mask.mod(seqlen_q, seqlen_kv, device)
        return lambda b, h, q, k: own(b // len(cases), h, q, k)

    assert answer(cases) == 3
    assert not any(list(differences(case)) for case in cases)
    for case in cases:
        case.answers.clear()
    monkeypatch.setattr(stacked.Repeated, "mod", runs)
    assert answer(cases) == 3
    assert any(list(differences(case)) for case in cases)
    with pytest.raises(ValueError, match="no multiple of 2"):
        stacked.Repeated(shape.mask, 2).check(3)


def test_a_case_that_is_not_finite_leaves_its_neighbours_as_they_are() -> None:
    cases = asked_of([BASE.but(seed=n) for n in range(3)], FORWARDS["ordered"])
    q, k, v = cases[1].inputs
    spoiled = v.clone()
    spoiled[..., 5, :2] = torch.tensor([torch.inf, torch.nan], dtype=v.dtype)
    huge = q.clone()
    huge[:, 1] = torch.inf
    cases[1] = replace(cases[1], inputs=(huge, k, spoiled))
    assert answer(cases) == 3
    assert not bool(cases[1].answers[0].truth.out.isfinite().all())
    for case in cases:
        assert not list(differences(case))
    assert bool(cases[0].answers[0].truth.out_bound.isfinite().all())


def test_a_stack_that_fails_leaves_its_cases_to_be_computed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = asked_of([BASE.but(seed=n) for n in range(3)], Numerics())
    others = asked_of([BASE.but(seed=n, seqlen_q=5) for n in range(2)], Numerics())
    compute = stacked.compute_truth_on

    def failing(*given: object, **more: object) -> Truth:
        if given[1].seqlen_q == 37:  # type: ignore[attr-defined]
            raise RuntimeError("no memory")
        return compute(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(stacked, "compute_truth_on", failing)
    assert answer([*cases, *others]) == 2
    assert [len(case.answers) for case in (*cases, *others)] == [0, 0, 0, 1, 1]


def test_only_cases_of_one_shape_and_arithmetic_share_a_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stacks: list[list[Asked]] = []
    monkeypatch.setattr(stacked, "_answer", stacks.append)
    plain = asked_of([BASE.but(seed=n) for n in range(5)], Numerics())
    scaled = asked_of([BASE.but(seed=n, softmax_scale=2.0) for n in range(2)], Numerics())
    sharper = asked_of([BASE.but(seed=n) for n in range(2)], forward.BEST)
    alone = asked_of([BASE.but(seqlen_q=9)], Numerics())
    monkeypatch.setitem(stacked._MOST, "cpu", 2 * stacked._size(BASE))
    mixed = [plain[0], scaled[0], *alone, sharper[0], *plain[1:], sharper[1], scaled[1]]
    assert answer(mixed) == 8
    assert stacks == [plain[:2], plain[2:4], scaled, sharper]


def test_the_size_of_the_whole_stack_says_where_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products: list[float] = []

    def on_device(asked: float, compute: Callable[[torch.device], list[Truth]]) -> list[Truth]:
        products.append(asked)
        return compute(torch.device("cpu"))

    monkeypatch.setattr(stacked, "on_device", on_device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    each = float(BASE.pairs * (BASE.head_dim + BASE.head_dim_v))
    monkeypatch.setattr(truth, "_WORTH_A_GPU", 3.5 * each)
    monkeypatch.setitem(stacked._MOST, "cpu", 2 * stacked._size(BASE))
    assert answer(asked_of([BASE.but(seed=n) for n in range(4)], Numerics())) == 4
    assert products == [4 * each]  # worth a GPU, which none of them is alone
    assert truth.device_for(each).type == "cpu"
    assert truth.device_for(products[0]).type == "cuda"
    products.clear()
    # No stack of these is worth a GPU, although all of them together are.
    monkeypatch.setitem(stacked._MOST, "cuda", 3 * stacked._size(BASE))
    assert answer(asked_of([BASE.but(seed=n) for n in range(4)], Numerics())) == 4
    assert products == [2 * each, 2 * each]


def test_what_a_stack_cannot_hold_is_named() -> None:
    eight = BASE.but(dtype="float8_e4m3fn", quantisation=parse_quantisation("head"))
    for problem, word in ((eight, "quantisation"), (BASE.but(seqlen_q=0), "key")):
        assert word in str(excludes(problem, []))
        cases = asked_of([problem, problem.but(seed=1)], Numerics())
        assert answer(cases) == 0
        assert not any(case.answers for case in cases)
    assert excludes(BASE, []) is None
    with pytest.raises(ValueError, match="counts"):
        next(apart(_one(), (1, 1)))


def test_parts_of_one_tensor_are_put_together_without_a_copy() -> None:
    whole = torch.arange(48.0).view(6, 2, 4)
    for counts in ((1, 2, 3), (2, 4)):
        found = together(whole.split(counts))
        assert found.data_ptr() == whole.data_ptr()
        assert torch.equal(found, whole)
    inner = together(whole[1:].split((2, 3)))
    assert inner.data_ptr() == whole[1:].data_ptr()
    assert torch.equal(inner, whole[1:])
    apart_from_each_other = (
        (whole[:2], whole[3:]),  # a gap
        (whole[2:4], whole[:2]),  # another order
        (whole[:, :1], whole[:, 1:]),  # not contiguous
        (whole[:2], whole[2:].clone()),
        (whole[:0], whole[:2]),
    )
    for parts in apart_from_each_other:
        assert torch.equal(together(parts), torch.cat(parts))
        assert together(parts).data_ptr() != whole.data_ptr()


def _one() -> Truth:
    case = asked_of([BASE], Numerics())[0]
    return compute_truth(BASE, case.inputs, list(case.questions[0]))
