"""docs/mutation.md: the scores of all records, and every survivor with its reason."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.harness.wrapped import item, wrapped
from tests.mutants.mutant import Mutant
from tests.mutants.record import (
    CUDA,
    CUTE,
    EQUIVALENT,
    KILLED,
    SURVIVORS,
    TRITON,
    UNSEEN,
    Ledger,
    Reason,
    Score,
)
from tests.mutants.triton.mutant import TritonMutant
from verify.cell.process import ROOT

PATH = ROOT / "docs" / "mutation.md"
_HEAD = """# Mutation score

How many small changes of the shipped kernels the suite convicts without a GPU. Written by
`python -m tests.mutants`; `tests/meta/campaign/test_mutants.py` and `test_cuda_mutants.py` replay a
part, and so does [`verify bench mutants`](benchmarks.md#mutants-killed-per-minute).

A *convicted* mutant fails a question. A mutant that is *not seen* passes all of them, though it is
wrong somewhere. An *equivalent* one is right on every problem of the support. A *broken* one
raises whatever it is asked, or does not compile. Only the first two count."""
_TRITON = """Each mutant has one change by an operator of `tests/mutants/triton/operators.py`. It
ran in Triton's interpreter, and the judge asked a part of what a campaign asks, until a verdict
failed."""
_CUDA = """Each mutant has one change by an operator of `tests/mutants/cuda/operators.py` in a
header of the raw-PTX kernels. A host compiler compiled nineteen builds of it; they ran on emulated
threads, barriers and copies ([ptx.md](ptx.md)), warps as unfairly as barriers allow, copies as
early or as late as waits allow. The questions are those of `tests/harness/ptx_cases.py`, judged by
the bounds of O and LSE, by what lies around the tensors and by bank conflicts. A mutant whose
builds all have the machine code of the right kernel is not asked: it survives, too."""
_CUTE = """Each mutant has one change by an operator of `tests/mutants/cuda/operators.py` in a
source of `cute-flash-forward`. A host compiler compiled three builds of it with CuTe's own layouts,
swizzles and partitions; they ran as those above, and were asked what `tests/harness/cute_cases.py`
lists."""


Key = Callable[[Mutant], str]
_KEYS: tuple[tuple[str, Key], ...] = (
    ("File", lambda mutant: f"`{mutant.edited}`"),
    ("Operator", lambda mutant: mutant.mutation.operator),
)


@dataclass(frozen=True)
class Part:
    """The mutants of one language.

    keys: what tables are by, each with its title.
    """

    title: str
    about: str
    mutants: Sequence[Mutant]
    ledger: Ledger
    keys: tuple[tuple[str, Key], ...] = _KEYS


def parts(
    triton: Sequence[TritonMutant], cuda: Sequence[Mutant], cute: Sequence[Mutant]
) -> tuple[Part, ...]:
    """Of all languages."""
    judged = {mutant.id: mutant.variant for mutant in triton}
    kernels: tuple[str, Key] = ("Kernel that is judged", lambda mutant: f"`{judged[mutant.id]}`")
    return (
        Part("Triton kernels", _TRITON, triton, TRITON, (kernels, *_KEYS)),
        Part("CUDA kernels", _CUDA, cuda, CUDA),
        Part("CuTe kernel", _CUTE, cute, CUTE),
    )


def document(given: Iterable[Part]) -> str:
    """docs/mutation.md."""
    given = list(given)
    lines = [_HEAD, "", _whole(given), "", *(line for part in given for line in _part(part))]
    return "\n".join(lines).rstrip("\n") + "\n"


def _whole(given: Sequence[Part]) -> str:
    """The scores of all languages together."""
    scores = [Score.of(part.mutants, part.ledger) for part in given]
    killed, counted, judged = (
        sum(getattr(score, name) for score in scores) for name in ("killed", "counted", "judged")
    )
    chosen = sum(len(part.mutants) for part in given)
    score = 100 * killed / counted
    return wrapped(
        f"{judged} of {chosen} chosen mutants are judged. **{counted} of them are neither"
        f" equivalent nor broken, and {killed} of these are convicted: {score:.1f} %.**"
    )


def _part(part: Part) -> list[str]:
    entries = part.ledger.current(part.mutants)
    judged = [mutant for mutant in part.mutants if mutant.id in entries]
    whole = Score.of(judged, part.ledger)
    killed = [entries[mutant.id] for mutant in judged if entries[mutant.id].how == KILLED]
    seconds = [entry.seconds for entry in killed]
    by = Counter(entry.by.split(":")[0] for entry in killed)
    rate = 60 * len(killed) / sum(seconds) if killed else 0.0
    return [
        f"## {part.title}",
        "",
        f"{part.about}",
        "",
        wrapped(
            f"{len(judged)} of {len(part.mutants)} chosen mutants are judged. **{whole.killed} are"
            f" convicted, {whole.unseen} are not seen: a score of {whole.shown}.**"
            f" {whole.equivalent} are equivalent, {whole.broken} broken."
        ),
        "",
        wrapped(
            f"A conviction took {statistics.median([e.asked for e in killed] or [0]):.0f} case in"
            f" the median and {max([e.asked for e in killed], default=0)} at most,"
            f" {statistics.median(seconds or [0]):.1f} s in the median, {rate:.0f} a minute, on one"
            " core of several in use."
        ),
        "",
        wrapped(
            "What convicts first: "
            + ", ".join(f"{name} {count}" for name, count in by.most_common())
            + "."
        ),
        "",
        *(line for title, key in part.keys for line in _table(title, part, key)),
        *_survivors(part, UNSEEN, "Not seen", "no question shows it"),
        *_survivors(part, EQUIVALENT, "Equivalent", "they are right"),
    ]


def _table(title: str, part: Part, key: Key) -> list[str]:
    lines = [
        f"| {title} | Judged | Convicted | Not seen | Score | Equivalent | Broken |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in sorted({key(mutant) for mutant in part.mutants}):
        mine = [mutant for mutant in part.mutants if key(mutant) == name]
        s = Score.of(mine, part.ledger)
        lines.append(
            f"| {name} | {s.judged} of {len(mine)} | {s.killed} | {s.unseen} | {s.shown} |"
            f" {s.equivalent} | {s.broken} |"
        )
    return [*lines, ""]


def _survivors(part: Part, what: str, title: str, why: str) -> list[str]:
    """A list of the survivors of that kind; one without a reason is not seen."""
    entries, reasons = part.ledger.current(part.mutants), part.ledger.reasons()
    unknown = Reason(UNSEEN, "not explained")
    lines = []
    for mutant in part.mutants:
        reason = reasons.get(mutant.id, unknown)
        if mutant.id in entries and entries[mutant.id].how in SURVIVORS and reason.what == what:
            before, after = (f"`{text}`" if text else "nothing" for text in texts(mutant))
            place = f"`{mutant.id}`, line {mutant.mutation.line}"
            lines.append(item(f"{place}: {before} becomes {after}: {reason.why}"))
    return [f"{title}, and why {why}:", "", *lines, ""] if lines else []


def texts(mutant: Mutant) -> tuple[str, str]:
    """What the source says, and what the mutant says in its place."""
    return mutant.before.strip(), mutant.after.strip()
