"""Complete trials of sample kernels: a judge judges one case at a time, in a cell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from verify.bundle import ROOT
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.evidence import Recorder, Verdict
from verify.oracles import groups
from verify.problem import Problem
from verify.variant import Contract, Declaration

SAMPLES = ROOT / "tests" / "sample_kernels"


@dataclass(frozen=True)
class Bench:
    """A judge, and the variants of one kernel file by name."""

    judge: Judge
    variants: dict[str, Declaration]

    def verdict(
        self,
        variant: str,
        group: str,
        oracle: str,
        problem: Problem,
        contract: Contract | None = None,
    ) -> Verdict:
        """One oracle's verdict on a case, which must not be inapplicable.

        contract: used instead of the declared one.
        """
        declaration = self.variants[variant]
        declaration = replace(declaration, contract=contract or declaration.contract)
        target = Target(declaration, declaration.configs[0], problem.dtype, group)
        verdicts = {verdict.oracle: verdict for verdict in self.judge.judge(target, problem)}
        assert verdicts[oracle].outcome in ("pass", "fail"), (
            f"{oracle} does not concern itself with {problem.name}"
        )
        return verdicts[oracle]

    def check_caught(self, group: str, fault: str, problem: Problem, words: str) -> None:
        """That the group's oracle convicts a fault that the bound lets pass, and says these words;
        the right kernel passes both."""
        backward = groups()[group].entry == "backward"
        bound = ("gradients", "gradient_bound") if backward else ("accuracy", "bound")
        verdict = self.verdict(fault, *bound, problem)
        assert verdict.outcome == "pass", verdict.finding
        assert self.verdict("right", group, group, problem).outcome == "pass"
        verdict = self.verdict(fault, group, group, problem)
        assert verdict.finding is not None, f"{fault} passes {group}"
        assert words in verdict.finding.message


@contextmanager
def bench(file: str, directory: Path) -> Iterator[Bench]:
    """Open a bench for a sample kernel file; evidence goes into the directory."""
    declarations = roster([SAMPLES / file]).declarations
    judge = Judge(Recorder(directory, "main"))
    try:
        yield Bench(judge, {declaration.name: declaration for declaration in declarations})
    finally:
        judge.close()
