"""Statistics of the whole campaign as a report has them."""

from __future__ import annotations

from collections.abc import Iterable

from verify.report.campaign_schema import PoolReport
from verify.report.schema import TENSORS
from verify.statistics.pool import Pool


def reports(pools: Iterable[Pool]) -> list[PoolReport]:
    """One entry per (variant, dtype, tensor) with judged rows, in this order, tensors as in
    TENSORS."""
    found = sorted(pools, key=lambda pool: (pool.variant, pool.dtype, TENSORS.index(pool.tensor)))
    return [_report(pool) for pool in found]


def _report(pool: Pool) -> PoolReport:
    made: PoolReport = {
        "variant": pool.variant,
        "dtype": pool.dtype,
        "tensor": pool.tensor,
        "cases": pool.cases,
        "rows": pool.rows,
        "rms": pool.rms,
        "mean": pool.mean,
        "toward": pool.toward,
        "slack": pool.slack,
        "least": pool.least,
        "share": pool.share,
        "rms_limit": pool.rms_limit,
        "mean_limit": pool.mean_limit,
        "failing": [name for name, _, _ in pool.excesses],
        "too_good": pool.too_good,
    }
    if pool.weight > 0:
        made["weighed"] = pool.weighed
        made["weighed_limit"] = pool.weighed_limit
    return made
