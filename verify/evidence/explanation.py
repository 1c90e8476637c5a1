"""Explanation: a failing verdict in words.  Imports no torch, so that a command can print it at
once."""

from __future__ import annotations

from collections.abc import Iterable

from verify.evidence import Verdict

_WHOLE = "campaign"  # the group of `verify.statistics.verdicts`, which this module cannot import


def explain(verdict: Verdict) -> str:
    """A failing verdict for the person who has to act."""
    assert verdict.finding is not None
    found = verdict.finding
    if verdict.group == "loading":  # there is no case to tell of
        return f"{verdict.variant} {found.message}"
    counts = f"\n  how many {found.count} of {found.total}" if found.total else ""
    others = found.before_count
    before = f"  after    other cases in the same process: {others}\n" if others else ""
    return (
        f"{verdict.oracle}: {found.message}\n"
        f"  variant  {verdict.variant}\n  config   {verdict.config}\n"
        f"  oracle   {verdict.oracle} ({verdict.group})\n"
        f"  got      {found.got}\n  bound    {found.bound}\n"
        f"  where    {found.where or 'the whole run'}{counts}\n"
        f"  problem  {verdict.problem}\n{before}  replay   {found.replay}"
    )


def smallest(failures: Iterable[Verdict]) -> list[Verdict]:
    """The failing verdict with the shortest case id of each (variant, config, oracle), in order;
    those on all cases of a campaign come last, since one case is understood sooner."""
    found: dict[tuple[str, str, str], Verdict] = {}
    for verdict in failures:
        key = (verdict.variant, verdict.config, verdict.oracle)
        if key not in found or len(verdict.case) < len(found[key].case):
            found[key] = verdict
    return sorted(found.values(), key=lambda verdict: verdict.group == _WHOLE)
