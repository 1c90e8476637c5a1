"""Tests that fail without a verdict: the error is one of the judge, and is recorded."""

from __future__ import annotations

import contextlib

import pytest

from verify.campaign import halt
from verify.campaign.run import CampaignRun
from verify.campaign.runner import NO_SPACE
from verify.evidence import errors

_ERROR = "error of the judge"


def tell(item: pytest.Item, report: pytest.TestReport, error: BaseException) -> None:
    """Stop all processes if --exitfirst was given; attach an error that is no verdict to the
    report, for `RecordsErrors` to record."""
    halt.failed()
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        item.session.shouldstop = f"cannot write evidence: {error}"
    fixtures = getattr(item, "fixturenames", ())
    judged = type(error).__name__.startswith("Convicted") or "unloadable" in fixtures
    if not judged:
        message = (
            str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        )
        report.user_properties.append((_ERROR, errors.shortened(message)))


class RecordsErrors:
    """Records, in the first process, the tests that failed without a verdict."""

    def __init__(self, run: CampaignRun) -> None:
        self.run = run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the error of a test, if it has one."""
        message = dict(report.user_properties).get(_ERROR)
        # xdist reports a crashed worker like this.
        if report.failed and message is None and str(report.when) == "???":
            message = errors.shortened(report.longreprtext)
        if message is None or not self.run.directory.is_dir():
            return
        refs = [declaration.ref for declaration in self.run.roster.declarations]
        error = errors.JudgeError(
            errors.variant_in(report.nodeid, refs), report.nodeid, str(message)
        )
        with contextlib.suppress(OSError):
            errors.record(self.run.directory, error)
