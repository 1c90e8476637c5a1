"""Contracts on trial: each property is measured right, a contradicted declaration is convicted, an
honest one passes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Mask, Window
from tests.harness.fake_trials import OK, PLAIN, acquitted, convicted, right_run, trial_of
from tests.harness.in_process import Kernel, declared, trial
from tests.properties import tier
from verify.cell.process import Reply
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles.contract import lse
from verify.oracles.contract import oracle as contract
from verify.problem import Problem
from verify.variant import Contract, Declaration, GradientNumerics

torch.set_num_threads(1)


def heard(
    kernel: Kernel, dtype: str = "bfloat16", declaration: Declaration | None = None
) -> tuple[dict[str, set[str]], str]:
    """All words by property, and all messages, of every problem that is asked."""
    declaration = declaration or declared()
    words: dict[str, set[str]] = {}
    messages = []
    for problem in contract.asks(declaration, dtype):
        ruling = contract.judge(trial(kernel, problem, declaration))
        for name, word in ruling.observed.items():
            words.setdefault(name, set()).add(word)
        if ruling.finding is not None:
            messages.append(ruling.finding.message)
    return words, "\n".join(messages)


def other_mask(kind: type[Mask], change: Callable[[Mask], Mask]) -> Callable[[Problem], Tensor]:
    """What a kernel sees that changes the masks of one kind."""

    def seen(p: Problem) -> Tensor:
        mask = change(p.mask) if isinstance(p.mask, kind) else p.mask
        return mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)

    return seen


def flipped(mask: Causal | Window) -> Mask:
    """The other alignment."""
    alignment = "tl" if mask.alignment == "br" else "br"
    return (
        Causal(alignment) if isinstance(mask, Causal) else Window(mask.left, mask.right, alignment)
    )


def windows(left: int, right: int) -> Callable[[Problem], Tensor]:
    """Window ends moved outwards by so many keys."""
    return other_mask(Window, lambda m: Window(m.left + left, m.right + right, m.alignment))


def modulo(p: Problem) -> tuple[Tensor, Tensor]:
    return (torch.arange(p.heads_q) % p.heads_kv,) * 2


def k_modulo(p: Problem) -> tuple[Tensor, Tensor]:
    return torch.arange(p.heads_q) % p.heads_kv, torch.arange(p.heads_q) // p.group


def leaking(out: Tensor, p: Problem, call: int) -> Tensor:
    return out + 0 * out.sum((0, 1, 2), keepdim=True)


def unsteady(out: Tensor, p: Problem, call: int) -> Tensor:
    return out * (1 + (call % 2) * 2**-11)


def by_batch(out: Tensor, p: Problem, call: int) -> Tensor:
    return out * (1 + (p.batch > 2) * 2**-8)


def without_nan(scores: Tensor) -> Tensor:
    """The maximum as `max.f32` takes it: of the other operands, where one is NaN."""
    return scores.nan_to_num(nan=-math.inf, neginf=-math.inf).amax(-1, keepdim=True)


def clamped(x: Tensor) -> Tensor:
    """An exponential behind a clamp, which makes a number of NaN."""
    return torch.exp(torch.fmax(x, torch.tensor(-80.0)))


LN2 = math.log(2)
SWALLOWS = Kernel(maximum=without_nan, exp=clamped)
INFINITE = Kernel(lse=lambda n, m, t, s: n.nan_to_num(nan=math.inf))
NUMBER = Kernel(spoil=lambda out, p, call: out.nan_to_num(nan=0.0))
ONE_ROW = Kernel(
    spoil=lambda out, p, call: (
        out.clone().index_fill_(2, torch.tensor([1]), 0.5) if bool(out.isnan().any()) else out
    )
)
WRONG = {
    "base 2": (Kernel(lse=lambda n, m, t, s: n / LN2), "LSE natural, is base 2 ("),
    "negated": (Kernel(lse=lambda n, m, t, s: -n), "LSE natural, is natural, negated"),
    "maximum": (Kernel(lse=lambda n, m, t, s: m), "LSE natural, is the maximum alone ("),
    "log of the sum": (
        Kernel(lse=lambda n, m, t, s: t.log()),
        "is the logarithm of the row sum alone (",
    ),
    "row sum": (Kernel(lse=lambda n, m, t, s: t), "LSE natural, is the row sum"),
    "mixed bases": (
        Kernel(lse=lambda n, m, t, s: m / LN2 + t.log()),
        "is the maximum base 2, the row sum natural",
    ),
    "divided by the scale": (
        Kernel(lse=lambda n, m, t, s: n / s),
        "is natural, divided by softmax_scale",
    ),
    "off by one": (Kernel(lse=lambda n, m, t, s: n + 1), "LSE natural, is something else"),
    "inaccurate": (Kernel(lse=lambda n, m, t, s: n + 2**-13), "LSE natural, is natural, but "),
    "empty O is NaN": (Kernel(empty_out=math.nan), "O of empty row 0, is NaN"),
    "empty O is mean(V)": (Kernel(empty_out="mean"), "O of empty row 0, is the mean of V"),
    "empty LSE is finite": (Kernel(empty_lse=-1e30), "LSE of zero length -inf, is -1e+30"),
    "empty LSE is +inf": (Kernel(empty_lse=math.inf), "LSE of empty row -inf, is +inf"),
    "other alignment": (
        Kernel(seen=other_mask(Causal, flipped)),
        "causal bottom-right, is top-left (",
    ),
    "other alignment, tl": (
        Kernel(seen=other_mask(Causal, flipped)),
        "causal.tl top-left, is bottom-right (",
    ),
    "diagonal": (
        Kernel(seen=other_mask(Causal, lambda m: Window(None, -1, m.alignment))),
        "causal bottom-right, is bottom-right, diagonal excluded",
    ),
    "one key too many": (
        Kernel(seen=other_mask(Causal, lambda m: Window(None, 1, m.alignment))),
        "is top-left, one key too many",
    ),
    "no mask": (
        Kernel(seen=other_mask(Causal, lambda m: Window(None, None))),
        "causal.tl top-left, is no mask at all",
    ),
    "window, left": (
        Kernel(seen=windows(-1, 0)),
        "is bottom-right, left end exclusive, right end inclusive",
    ),
    "window, right": (
        Kernel(seen=windows(0, 1)),
        "is top-left, left end inclusive, right end one too far",
    ),
    "window, both": (Kernel(seen=windows(-1, -1)), "is bottom-right, both ends exclusive"),
    "window, alignment": (
        Kernel(seen=other_mask(Window, flipped)),
        "window bottom-right, both ends inclusive, is top-left, both ends inclusive",
    ),
    "window, sides": (
        Kernel(seen=other_mask(Window, lambda m: Window(m.right, m.left, m.alignment))),
        "is bottom-right, sides swapped",
    ),
    "softcap clips": (
        Kernel(cap=lambda s, c: s.clamp(-c, c)),
        "softcap c tanh(s / c), is s clipped to +-c",
    ),
    "softcap ignored": (Kernel(cap=lambda s, c: s), "softcap c tanh(s / c), is ignored"),
    "softcap without its factor": (
        Kernel(cap=lambda s, c: torch.tanh(s / c)),
        "is tanh(s / c) without the factor c",
    ),
    "softcap after the mask": (
        Kernel(cap_after_mask=True),
        "is the mask, then the cap: masked keys weigh exp(-c)",
    ),
    "heads": (Kernel(heads=modulo), "is V h % heads_kv; K h % heads_kv"),
    "heads of K": (Kernel(heads=k_modulo), "is V h // group; K h % heads_kv"),
    "NaN swallowed, Q": (
        SWALLOWS,
        "NaN in Q NaN, LSE NaN, is finite, LSE -inf (rows that read it: 1)",
    ),
    "NaN swallowed, K": (
        SWALLOWS,
        "NaN in K NaN, LSE NaN, is finite, LSE finite (rows that read it: 10)",
    ),
    "NaN of one row swallowed": (ONE_ROW, "NaN in K NaN, LSE NaN, is NaN or finite, LSE NaN ("),
    "NaN in V made a number": (NUMBER, "NaN in V NaN, is 0 ("),
    "NaN made an infinite LSE": (INFINITE, "NaN in Q NaN, LSE NaN, is NaN, LSE +inf ("),
    "NaN leaks": (Kernel(spoil=leaking), "NaN in Q no row but those that read it"),
    "not deterministic": (
        Kernel(spoil=unsteady),
        "repetition bitwise the same in 5 runs, is differs in 5 runs",
    ),
    "batch": (Kernel(spoil=by_batch), "batch invariance bitwise the same, is differs in"),
}


@tier.first_tier("name", "dtype")
@pytest.mark.parametrize("name", tier.for_ci(WRONG, keep=4))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_contradiction_is_convicted_and_named(name: str, dtype: str) -> None:
    kernel, words = WRONG[name]
    assert words in heard(kernel, dtype)[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_right_kernel_passes_and_every_property_is_measured(dtype: str) -> None:
    words, messages = heard(Kernel(), dtype)
    assert not messages
    assert {name: words[name] for name in words if ":" not in name} == {
        "LSE": {"natural"},
        "O of empty row": {"0"},
        "LSE of empty row": {"-inf"},
        "O of zero length": {"0"},
        "LSE of zero length": {"-inf"},
        "causal": {"bottom-right"},
        "causal.tl": {"top-left"},
        "window": {"bottom-right, both ends inclusive"},
        "window.tl": {"top-left, both ends inclusive"},
        "softcap": {"c tanh(s / c)"},
        "softcap and mask": {"the cap, then the mask"},
        "key head": {"V h // group; K h // group"},
        "NaN in Q": {"NaN, LSE NaN"},
        "NaN in K": {"NaN, LSE NaN"},
        "NaN in V": {"NaN"},
        "infinity in V": {"+inf"},
        "score of +inf": {"NaN, LSE NaN"},
        "score of -inf": {"finite, LSE finite"},
        "NaN behind a mask": {"spreads from V"},
        "repetition": {"bitwise the same in 5 runs"},
        "batch invariance": {"bitwise the same"},
        "head invariance": {"bitwise the same"},
    }


HONEST = {
    "base 2": (Kernel(lse=lambda n, m, t, s: n / LN2), Contract(lse="base2"), "LSE", "base 2"),
    "NaN rows": (
        Kernel(empty_out=math.nan),
        Contract(empty_row_out=math.nan),
        "O of empty row",
        "NaN",
    ),
    "infinite LSE": (
        Kernel(empty_lse=math.inf),
        Contract(empty_row_lse=math.inf),
        "LSE of zero length",
        "+inf",
    ),
    "not deterministic": (
        Kernel(spoil=unsteady),
        Contract(deterministic=False, batch_invariant=False),
        "repetition",
        "differs in 5 runs",
    ),
    "batch": (
        Kernel(spoil=by_batch),
        Contract(batch_invariant=False),
        "batch invariance",
        "differs in 3 of 4 placements",
    ),
    "masked values": (
        Kernel(masked_zero=False),
        Contract(masked_values="any"),
        "NaN behind a mask",
        "no effect",
    ),
    "NaN swallowed": (SWALLOWS, Contract(nan="any"), "NaN in K", "finite, LSE finite"),
    "NaN in V made a number": (NUMBER, Contract(nan="any"), "NaN in V", "0"),
    "NaN made an infinite LSE": (INFINITE, Contract(nan="out"), "NaN in Q", "NaN, LSE +inf"),
    "NaN without an LSE": (Kernel(), Contract(lse=None), "NaN in K", "NaN"),
    "no LSE": (Kernel(), Contract(lse=None), "key head", "V h // group; K h // group"),
}


@pytest.mark.parametrize("name", tier.for_ci(HONEST, keep=3))
def test_the_same_passes_where_it_is_declared(name: str) -> None:
    kernel, promised, item, word = HONEST[name]
    words, messages = heard(kernel, "float16", declared(promised))
    assert not messages
    assert words[item] == {word}


def test_masked_values_that_spread_are_convicted_where_they_must_not() -> None:
    _, messages = heard(Kernel(), "float16", declared(Contract(masked_values="any")))
    assert "NaN behind a mask no effect, is spreads from V" in messages


@pytest.mark.parametrize("kernel", [SWALLOWS, NUMBER], ids=["scores", "out"])
def test_a_nan_must_reach_o_where_that_is_all_that_is_promised(kernel: Kernel) -> None:
    _, messages = heard(kernel, "float16", declared(Contract(nan="out")))
    assert "declares NaN in K NaN, any LSE, is " in messages


def test_the_hypotheses_of_the_lse_differ_on_what_is_asked() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        problem = contract.asks(declared(), dtype)[0]
        found = lse.hypotheses(trial(Kernel(), problem))
        assert len(found) == 15, [h.word for h in found]


def test_a_narrow_support_is_asked_what_it_has() -> None:
    narrow = declared(
        masks=("causal.square",),
        cross_lengths=False,
        score_mods=(),
        grouped_heads=False,
        min_seqlen=1,
    )
    words, messages = heard(Kernel(), "float16", narrow)
    assert not messages
    assert words["causal, square"] == {"diagonal included"}
    assert {"LSE", "repetition", "batch invariance"} <= set(words)
    assert (words["NaN in K"], words["NaN in V"]) == ({"NaN, LSE NaN"}, {"NaN"})
    assert "NaN in K NaN, LSE NaN, is finite" in heard(SWALLOWS, "float16", narrow)[1]
    _, messages = heard(
        Kernel(seen=other_mask(Causal, lambda m: Window(None, -1))), "float16", narrow
    )
    assert "causal, square diagonal included, is diagonal excluded" in messages


def test_a_further_run_that_fails_is_convicted_for_that() -> None:
    problem = contract.asks(declared(), "float16")[0]
    asked = trial(Kernel(), problem)
    asked.launches["repeated2"] = Launch(Reply("crash", "killed by SIGSEGV"), "nan")
    convicted(contract.judge(asked), "SIGSEGV")


def backward(
    problem: Problem, plant: Callable[[dict[str, Tensor]], None] | None = None, steady: bool = True
) -> Ruling:
    """A backward of exact gradients; `plant` changes those of its third run, or of the first where
    rows are empty."""
    promised = Contract(deterministic_backward=steady)
    asked: Trial = trial_of(
        problem, contract=promised, gradients=GradientNumerics(), entries=("forward", "backward")
    )
    asked.entry = "backward"
    asked.launches["saved"] = right_run(asked)
    exact = {
        name: getattr(asked.gradients, name).to(problem.format.torch) for name in ("dq", "dk", "dv")
    }
    for tag in ("first", "repeated1", "repeated2", "repeated3", "repeated4"):
        made = {name: tensor.clone() for name, tensor in exact.items()}
        if plant is not None and tag == ("first" if problem.mask != PLAIN.mask else "repeated2"):
            plant(made)
        asked.launches[tag] = Launch(OK, "nan", made)
    return contract.judge_backward(asked)


def test_gradients_that_differ_between_runs_contradict_a_deterministic_backward() -> None:
    def plant(made: dict[str, Tensor]) -> None:
        made["dk"][1, 0, 2, 3] *= 1 + 2**-20

    assert acquitted(backward(PLAIN))
    convicted(
        backward(PLAIN, plant),
        "gradients, repetition bitwise the same in 5 runs, is differs in 5 runs",
        "1 of 576 elements of dk",
    )
    free = backward(PLAIN, plant, steady=False)
    assert acquitted(free)
    assert free.observed["gradients, repetition"] == "differs in 5 runs"


def test_gradients_of_what_sees_nothing_are_zero() -> None:
    problem = PLAIN.but(seqlen_q=9, seqlen_kv=6, mask=Causal())
    assert acquitted(backward(problem))
    assert backward(problem).observed["dq of empty rows"] == "0"
    convicted(
        backward(problem, lambda made: made["dq"][0, 0, 1].fill_(1e-30)),
        "dq of empty rows 0, is 1e-30",
    )
    hidden = PLAIN.but(mask=Causal("tl"))
    convicted(
        backward(hidden, lambda made: made["dv"][0, 0, -1].fill_(math.nan)),
        "dv of keys that no query sees 0, is NaN",
    )
