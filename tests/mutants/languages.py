"""The languages of mutants: their records, what opens a hunt of each, and which mutants share
work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tests.faults.stand import Stand
from tests.mutants import record
from tests.mutants.cuda.hunt import CudaHunt
from tests.mutants.cuda.mutant import chosen as cuda_chosen
from tests.mutants.cute.hunt import CuteHunt
from tests.mutants.cute.mutant import chosen as cute_chosen
from tests.mutants.mutant import Mutant
from tests.mutants.record import Entry, Ledger
from tests.mutants.triton.hunt import TritonHunt
from tests.mutants.triton.mutant import chosen
from tests.mutants.truths import remembered


class Hunt(Protocol):
    """Hunts the mutants of one language, one after the other."""

    def learn(self, mutants: Iterable[Any], entries: Mapping[str, Entry]) -> None:
        """Count what convicted mutants before: it is asked first."""

    def prepare(self, mutants: Sequence[Any]) -> None:
        """These are hunted next, one after the other."""

    def __call__(self, mutant: Any) -> Entry:
        """What becomes of a mutant."""


@dataclass(frozen=True)
class Language:
    """One language.

    chosen: its mutants that are judged.  ground: which mutants share questions and truths.
    together: how many mutants are prepared together.
    """

    name: str
    chosen: Callable[[], Sequence[Mutant]]
    opened: Callable[[], AbstractContextManager[Hunt]]
    ground: Callable[[Any], str]
    together: int = 1

    @property
    def ledger(self) -> Ledger:
        """Where its record is, as `record` says now."""
        ledger: Ledger = getattr(record, self.name.upper())
        return ledger


@contextmanager
def _triton() -> Iterator[Hunt]:
    with Stand() as stand, remembered():
        yield TritonHunt(stand)


LANGUAGES: Mapping[str, Language] = {
    language.name: language
    for language in (
        Language("triton", chosen, _triton, lambda mutant: str(mutant.variant)),
        Language("cuda", cuda_chosen, CudaHunt, lambda mutant: str(mutant.edited)),
        # CuTe's templates are made once for all mutants that are compiled together
        Language("cute", cute_chosen, CuteHunt, lambda mutant: "", together=6),
    )
}
