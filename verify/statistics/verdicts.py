"""Failing verdicts on a campaign as a whole: where pooled errors are not those of the declared
arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verify.evidence import Finding, Verdict
from verify.problem.case import replay_command
from verify.statistics.pool import Pool, pools

ORACLE, GROUP = "statistics", "campaign"

_SAID = {
    "rms": (
        "root of the mean square of error / (sigma + allowance) is {value:.4g}, honest arithmetic"
        " stays below {limit:.4g}"
    ),
    "mean": (
        "mean of error / (sigma + allowance) is {value:+.4g}, honest arithmetic stays within"
        " {limit:.4g}"
    ),
    "toward": (
        "results are too {way}: mean of error / (sigma + allowance), with the exact value's sign,"
        " is {value:+.4g}, honest arithmetic stays within {limit:.4g}"
    ),
    "weighed": (
        "root of the mean square of error / hypot(sigma, allowance), weighted by what errors of"
        " weights have in it, is {value:.4g}, honest arithmetic stays below {limit:.4g}"
    ),
}


def findings(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """A failing verdict for every pool that honest arithmetic as declared would not have left, its
    worst case as replay."""
    return [
        _verdict(pool, excesses) for pool in pools(verdicts) if (excesses := list(pool.excesses))
    ]


def campaign_case(pool: Pool) -> str:
    """The case id of a verdict on a pool."""
    return f"{pool.variant}:-:{GROUP}:{pool.dtype}.{pool.tensor}"


def _verdict(pool: Pool, excesses: Sequence[tuple[str, float, float]]) -> Verdict:
    said = [
        _SAID[name].format(value=value, limit=limit, way="small" if value < 0 else "large")
        for name, value, limit in excesses
    ]
    first, value, limit = excesses[0]
    message = f"over {pool.rows} rows of {pool.tensor} of {pool.cases} cases, " + "; ".join(said)
    finding = Finding(
        oracle=ORACLE,
        message=message,
        got=value,
        bound=limit,
        where=pool.tensor,
        replay=replay_command(pool.worst[first]),
    )
    return Verdict(
        case=campaign_case(pool),
        variant=pool.variant,
        config="-",
        dtype=pool.dtype,
        oracle=ORACLE,
        group=GROUP,
        outcome="fail",
        phase="generate",
        problem="-",
        measures={
            "rows": float(pool.rows),
            "rms": pool.rms,
            "mean": pool.mean,
            "toward": pool.toward,
        },
        finding=finding,
    )
