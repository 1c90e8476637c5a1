"""docs/mutation.md: the scores of all records, and every survivor with its reason."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.mutants.mutant import Mutant
from tests.mutants.record import CUDA, CUTE, KILLED, SURVIVORS, TRITON, Ledger, Score
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
header of the raw-PTX kernels. A host compiler compiled eighteen builds of it; they ran on emulated
threads, barriers and copies ([ptx.md](ptx.md)), warps as unfairly as barriers allow, copies as
early or as late as waits allow. The questions are those of `tests/harness/ptx_cases.py`, judged by
the bounds of O and LSE, by what lies around the tensors and by bank conflicts. A mutant whose
builds all have the machine code of the right kernel is not asked: it survives, too."""
_CUTE = """Each mutant has one change by an operator of `tests/mutants/cuda/operators.py` in a
source of `cute-flash-forward`. A host compiler compiled two builds of it with CuTe's own layouts,
swizzles and partitions; they ran as those above, and were asked what `tests/harness/cute_cases.py`
lists."""


@dataclass(frozen=True)
class Part:
    """The mutants of one language."""

    title: str
    about: str
    mutants: Sequence[Mutant]
    ledger: Ledger


def parts(
    triton: Sequence[Mutant], cuda: Sequence[Mutant], cute: Sequence[Mutant]
) -> tuple[Part, ...]:
    """Of all languages."""
    return (
        Part("Triton kernels", _TRITON, triton, TRITON),
        Part("CUDA kernels", _CUDA, cuda, CUDA),
        Part("CuTe kernel", _CUTE, cute, CUTE),
    )


def document(given: Iterable[Part]) -> str:
    """docs/mutation.md."""
    return "\n".join([_HEAD, *(line for part in given for line in _part(part))]) + "\n"


def _part(part: Part) -> list[str]:
    entries = part.ledger.current(part.mutants)
    judged = [mutant for mutant in part.mutants if mutant.id in entries]
    whole = Score.of(judged, part.ledger)
    killed = [entries[mutant.id] for mutant in judged if entries[mutant.id].how == KILLED]
    seconds = [entry.seconds for entry in killed]
    by = Counter(entry.by.split(":")[0] for entry in killed)
    rate = 60 * len(killed) / sum(seconds) if killed else 0.0
    return [
        "",
        f"## {part.title}",
        "",
        f"{part.about}",
        "",
        f"{len(judged)} of {len(part.mutants)} chosen mutants are judged. **{whole.killed} are"
        f" convicted, {whole.unseen} are not seen: a\nscore of {whole.shown}.** {whole.equivalent}"
        f" are equivalent, {whole.broken} broken.",
        "",
        f"A conviction took {statistics.median([e.asked for e in killed] or [0]):.0f} case in the"
        f" median and {max([e.asked for e in killed], default=0)} at most,"
        f" {statistics.median(seconds or [0]):.1f} s in the median,\n{rate:.0f} a minute, on one"
        " core of several in use.",
        "",
        "What convicts first: "
        + ", ".join(f"{name} {count}" for name, count in by.most_common())
        + ".",
        "",
        *_table("File", judged, part.ledger, lambda mutant: f"`{mutant.edited}`"),
        "",
        *_table("Operator", judged, part.ledger, lambda mutant: mutant.mutation.operator),
        "",
        "| Survivor | Line | Text | Becomes | Why it survives |",
        "|---|---:|---|---|---|",
        *(_survivor(m, part.ledger) for m in judged if entries[m.id].how in SURVIVORS),
    ]


def _table(
    title: str, judged: Sequence[Mutant], ledger: Ledger, key: Callable[[Mutant], str]
) -> list[str]:
    names = sorted({key(mutant) for mutant in judged})
    scores = {name: Score.of((m for m in judged if key(m) == name), ledger) for name in names}
    return [
        f"| {title} | Convicted | Not seen | Score | Equivalent | Broken |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {name} | {s.killed} | {s.unseen} | {s.shown} | {s.equivalent} | {s.broken} |"
            for name, s in scores.items()
        ),
    ]


def _survivor(mutant: Mutant, ledger: Ledger) -> str:
    reason = ledger.reasons().get(mutant.id)
    why = "not explained" if reason is None else f"{reason.what}: {reason.why}"
    texts = (f"`{text}`".replace("|", "\\|") for text in (mutant.before, mutant.after))
    return f"| `{mutant.id}` | {mutant.mutation.line} | " + " | ".join(texts) + f" | {why} |"
