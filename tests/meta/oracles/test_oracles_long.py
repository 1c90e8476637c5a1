"""Long sequences, forward: correct results pass, and what goes wrong at 15, 16 and 31 bits or in
the last tile does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal
from tests.harness.declared import flat_numerics
from tests.harness.fake_trials import convicted, trial_of
from tests.harness.long_trials import TALL, WIDE, Answer, Kernel, right, tried
from tests.properties import tier
from verify.cell.process import Environment
from verify.judging.findings import Ruling
from verify.judging.selected_positions import positions
from verify.oracles import of_group
from verify.oracles.long import long_rows, long_whole
from verify.oracles.long import problems as long
from verify.oracles.long.long_whole import gather_long
from verify.problem import Problem
from verify.variant import Support

torch.set_num_threads(1)

SUPPORT = Support(
    dtypes=("float16", "float32"),
    head_dims=range(8, 65),
    masks=("full", "causal"),
    grouped_heads=True,
)


def heard(problem: Problem, kernel: Kernel = right) -> dict[str, Ruling]:
    """What the group's oracles say of a kernel's answer, by name."""
    trial = tried(problem, kernel)
    # `long_offsets` launches by itself where 4 GiB are free: this trial holds an answer and no
    # kernel.
    asked = [
        oracle
        for oracle in of_group("long")
        if oracle.name != "long_offsets"
        and oracle.excludes(trial.declaration) is None
        and oracle.concerns(trial)
    ]
    return {oracle.name: oracle.judge(trial) for oracle in asked}


def convicting(problem: Problem, kernel: Kernel) -> set[str]:
    return {name for name, ruling in heard(problem, kernel).items() if ruling.finding is not None}


CORRECT = {
    "few rows, gather": WIDE.but(distribution="gather"),
    "few rows, negative LSE": WIDE.but(distribution="negative_lse"),
    "few rows, causal": WIDE.but(distribution="increasing", mask=Causal(), dtype="float32"),
    "few keys": TALL,
    "few keys, gather": TALL.but(distribution="gather"),
    "few keys, top left": TALL.but(mask=Causal("tl")),
    "rows without a key": TALL.but(mask=Causal()),
    "no group": WIDE.but(heads_kv=2, seqlen_kv=1 << 15),
    "many sequences": Problem(batch=3000, seqlen_q=2, seqlen_kv=5, head_dim=16, dtype="float16"),
}


@pytest.mark.parametrize("name", tier.for_ci(CORRECT, keep=3))
def test_correct_results_pass(name: str) -> None:
    rulings = heard(CORRECT[name])
    assert {"long_whole", "convexity"} < set(rulings)
    assert all(ruling.finding is None for ruling in rulings.values()), [
        r.finding for r in rulings.values() if r.finding
    ]


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_right_answers_to_all_that_a_gpu_is_asked_pass(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """With shorter sides."""
    for name, value in {
        "LONG": 577,
        "_CROWD": 70,
        "environment": lambda: Environment("", "cuda"),
    }.items():
        monkeypatch.setattr(long, name, value)
    support = replace(SUPPORT, dtypes=(dtype,), masks=("full", "causal", "lengths"))
    asked = long.forward_problems(trial_of(WIDE, support=support).declaration, dtype)
    assert len(asked) == 6
    assert {p.mask.kind for p in asked} == {"full", "causal", "lengths"}
    for problem in asked:
        rulings = heard(problem)
        assert all(ruling.finding is None for ruling in rulings.values()), (problem.name, rulings)


def dropped(limit: int) -> Kernel:
    """A loop over keys that ends where their index wraps."""
    return lambda p, q, k, v: right(p, q, k[:, :, :limit], v[:, :, :limit])


def wrapped(keys: int) -> Kernel:
    """K and V read at an offset that wraps."""

    def kernel(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Answer:
        index = torch.arange(p.seqlen_kv) % keys
        return right(p, q, k[:, :, index], v[:, :, index])

    return kernel


def unmasked_tail(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """The last tile is full: keys past the end are zeros, and weigh."""
    missing = -p.seqlen_kv % 64
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (k, v))
    return right(p, q, k, v)


def repeated_rows(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """Q read at an offset that wraps at 65536 rows."""
    return right(p, q[:, :, torch.arange(p.seqlen_q) % (1 << 16)], k, v)


def skipped(first: int, last: int) -> Kernel:
    """Rows that no program visits, over buffers that hold zeros."""

    def kernel(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Answer:
        out, lse = right(p, q, k, v)
        out[:, :, first:last], lse[:, :, first:last] = 0.0, 0.0
        return out, lse

    return kernel


def spoiled(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """One element of a row that was not chosen."""
    out, lse = right(p, q, k, v)
    out[0, 1, unchosen(p), 3] = torch.nan
    return out, lse


def unchosen(p: Problem) -> int:
    chosen = set(positions(p, "rows").tolist())
    return next(n for n in range(50_000, p.seqlen_q) if n not in chosen)


GAP = next(
    n
    for n in range(40_000, 60_000)
    if not set(range(n, n + 64)) & set(positions(TALL, "rows").tolist())
)

# Problem, kernel, and the oracles that must convict it.
FAULTS: dict[str, tuple[Problem, Kernel, set[str]]] = {
    "keys past 32768 dropped": (WIDE, dropped(1 << 15), {"long_rows"}),
    "keys past 32768 dropped, gathered": (
        WIDE.but(distribution="gather"),
        dropped(1 << 15),
        {"gather"},
    ),
    "keys past 65536 dropped, gathered": (
        WIDE.but(distribution="gather", seqlen_kv=100_000),
        dropped(1 << 16),
        {"gather"},
    ),
    "keys past 65536 dropped, the last ones weigh most": (
        WIDE.but(distribution="increasing"),
        dropped(1 << 16),
        {"long_rows"},
    ),
    "offsets of keys wrap": (WIDE.but(distribution="gather"), wrapped(1 << 14), {"gather"}),
    "offsets of keys wrap, chosen rows": (
        WIDE.but(distribution="increasing"),
        wrapped(1 << 16),
        {"long_rows"},
    ),
    "a tail that is not masked": (
        WIDE.but(distribution="negative_lse"),
        unmasked_tail,
        {"long_rows"},
    ),
    "rows past 65535 skipped": (TALL, skipped(1 << 16, TALL.seqlen_q), {"long_rows", "long_whole"}),
    "rows past 65535 skipped, gathered": (
        TALL.but(distribution="gather"),
        skipped(1 << 16, TALL.seqlen_q),
        {"gather"},
    ),
    "a tile of rows that were not chosen, skipped": (TALL, skipped(GAP, GAP + 64), {"long_whole"}),
    "offsets of rows wrap": (TALL, repeated_rows, {"long_rows"}),
    "offsets of rows wrap, gathered": (TALL.but(distribution="gather"), repeated_rows, {"gather"}),
    "a NaN in a row that was not chosen": (TALL, spoiled, {"long_whole"}),
}


@pytest.mark.parametrize("name", tier.for_ci(FAULTS, keep=2))
def test_a_fault_is_convicted(name: str) -> None:
    problem, kernel, by = FAULTS[name]
    assert by <= convicting(problem, kernel)


def test_the_finding_names_the_row() -> None:
    """The position in the sequence, not among the chosen ones."""
    trial = tried(TALL, skipped(1 << 16, TALL.seqlen_q))
    finding = convicted(long_rows.judge(trial), "the first 65536")
    row = int(finding.where.removeprefix("out[b=0, h=").split("q=")[1].split(",")[0])
    assert row >= 1 << 16
    assert row in positions(TALL, "rows").tolist()
    finding = convicted(long_whole.judge(trial), "of 131352 rows are wrong")
    assert finding.where == "lse[b=0, h=0, q=65536]"


def nudged(row: int) -> Kernel:
    """One O of a row is off by what 8 bits do not show."""

    def kernel(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Answer:
        out, lse = right(p, q, k, v)
        out[0, 1, row] *= 1 + 2.0**-13
        return out, lse

    return kernel


def test_an_output_in_fp32_that_is_off_in_a_row_with_bounds_is_convicted() -> None:
    p = TALL.but(distribution="gather", dtype="float32")
    convicted(gather_long(tried(p, nudged(TALL.seqlen_q - 1))), "one element of V")
    assert gather_long(tried(p, nudged(GAP))).finding is None  # docs/long-sequences.md says so


def _asked(monkeypatch: pytest.MonkeyPatch, device: str, **changes: object) -> list[Problem]:
    monkeypatch.setattr(long, "environment", lambda: Environment("", device))
    declaration = trial_of(WIDE, support=SUPPORT, **changes).declaration
    lists = (long.forward_problems, long.backward_problems)
    return [
        problem
        for dtype in SUPPORT.dtypes
        for asked in lists
        for problem in asked(declaration, dtype)
    ]


def test_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the support has; squares of kernels alone whose memory does not grow with them."""
    for device, changes in (
        ("cpu", {}),
        ("cuda", {}),
        ("cpu", {"interpreted": True}),
        ("cuda", {"allocates_outputs": True}),
    ):
        asked = _asked(monkeypatch, device, **changes)
        assert asked
        assert all(SUPPORT.refusal(p) is None for p in asked)
        longest = max(max(p.seqlen_q, p.seqlen_kv) for p in asked)
        assert longest > (1 << 15 if changes.get("interpreted") else 1 << 17)
        square = max(min(p.seqlen_q, p.seqlen_kv) for p in asked)
        assert (square > 1 << 17) == (device == "cuda" and not changes)
        assert (max(p.batch for p in asked) > 65535) == (device == "cuda" and not changes)
    at_once = _asked(monkeypatch, "cuda", numerics=flat_numerics(block_n=0))
    assert max(p.seqlen_q for p in at_once) > 1 << 17
    assert max(min(p.seqlen_q, p.seqlen_kv) for p in at_once) < 1 << 17
