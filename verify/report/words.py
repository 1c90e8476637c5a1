"""What statuses, tensors and measures are called where people read a report."""

from __future__ import annotations

from verify.document import Mark
from verify.report.power import FAULTS
from verify.report.schema import DTypeReport, Failure, Oracle, Status

TENSORS = {"out": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}
MEASURES = {
    **{f"r_{name}": f"r of {title}" for name, title in TENSORS.items()},
    "lse_ulp": "LSE error, ulp of fp32",
    "bound_ratio": "bound / best bound",
    **{f"power_{fault}": f"smallest fault noticed, {said}" for fault, said in FAULTS.items()},
    "spill": "spilled bytes per thread",
}


def label(status: Status, cases: int) -> str:
    """The word for a status; colour alone never says it."""
    if status == "grey":
        return "incomplete" if cases else "not run"
    return "pass" if status == "green" else "FAIL"


def tally(report: DTypeReport | Oracle) -> str:
    """ "3 of 120 fail", or the number of cases."""
    cases, failures = report["cases"], report["failures"]
    return f"{failures} of {cases} fail" if failures else f"{cases}"


def of_failing(failure: Failure) -> str:
    """Of how many failing cases one is the smallest; those of shrinking are told apart, for no
    other table counts them."""
    cases, shrunk = failure["cases"], failure.get("shrunk")
    if shrunk is None:
        return f"the smallest of {cases} failing, shrinking included"
    said = (
        f"the smallest of {cases - shrunk} failing" if cases > shrunk else "found while shrinking"
    )
    return said + (f" and {shrunk} met while shrinking" if shrunk and cases > shrunk else "")


def mark(status: Status, cases: int) -> Mark:
    """The status with its label."""
    return Mark(status, label(status, cases))
