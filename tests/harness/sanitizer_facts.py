"""The facts of a process under a sanitizer in which everything went well."""

from __future__ import annotations

from verify.sanitizers.facts import CaseResult, Facts
from verify.sanitizers.ledger import Launched


def right_facts(tool: str, run: tuple[Launched, ...]) -> Facts:
    """Of one case, which a tool without a summary watched, and which launched that."""
    return Facts(
        tool=tool,
        exit_code=0,
        summary=None,
        records=(),
        results=(CaseResult("case", "ok"),),
        expected_cases=1,
        launches=(run,),
        counted=True,
    )
