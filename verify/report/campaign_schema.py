"""Entries of `report.json` that are of a (variant, dtype) over a whole campaign; a part of
`verify.report.schema`."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from verify.evidence.strict_json import Integer, Number


class PoolReport(TypedDict):
    """The errors of one tensor of one (variant, dtype) over a campaign, in units of what its
    declared roundings make them.

    `verify.statistics.pool.Pool` says what the numbers are; weighed and its limit are missing where
    the evidence holds no weights.  failing: the tests that it does not pass, out of "rms", "mean",
    "toward" and "weighed".  too_good: errors are smaller than the declared roundings can leave
    them.
    """

    variant: str
    dtype: str
    tensor: str
    cases: Integer
    rows: Integer
    rms: Number
    mean: Number
    toward: Number
    slack: Number
    least: Number
    share: Number
    rms_limit: Number
    mean_limit: Number
    weighed: NotRequired[Number]
    weighed_limit: NotRequired[Number]
    failing: list[str]
    too_good: bool


class AccuracyReport(TypedDict):
    """Errors of O of one (variant, dtype), in ulp of its output (`verify.judging.comparison.ulps`).

    ulp50: median over the cases of each case's median; ulp99: of each case's 99th percentile, and
    ulp99_worst the largest of them.  best50, best99: the same of O rounded correctly, on the same
    cases.
    """

    variant: str
    dtype: str
    cases: Integer
    ulp50: Number
    ulp99: Number
    ulp99_worst: Number
    best50: Number
    best99: Number


class MutationReport(TypedDict):
    """Mutants of the sources of one variant, of the same source hash, and how many of them the
    suite convicts without a GPU (docs/mutation.md).

    killed: convicted ones; counted: those, and the ones that no question saw.  Of the `judged` ones
    the others are equivalent or broken.  chosen: those that the operators' text chose; the rest was
    not judged.
    """

    variant: str
    killed: Integer
    counted: Integer
    judged: Integer
    chosen: Integer


class PairsReport(TypedDict):
    """Which levels of two factors met in a judged case, of whatever variant
    (`verify.problem.factors`).

    met: pairs of levels that did.  never: those of levels that occur, each of another factor, which
    did not, by their names; some exclude each other.  levels: those that occur, by factor.
    """

    met: Integer
    never: list[str]
    levels: NotRequired[dict[str, list[str]]]


class ScoresReport(TypedDict):
    """What the oracle `kept_scores` saw of the scores of a plain function in one dtype.

    cases: asked ones; rounded: those beyond the sharper bounds in which a second launch shows that
    scores are rounded; undecided: those beyond them without such a launch.  r, case: of the worst
    undecided one; missing where there is none.
    """

    cases: Integer
    rounded: Integer
    undecided: Integer
    r: NotRequired[Number]
    case: NotRequired[str]


class PowerReport(TypedDict):
    """The smallest fault of one class that the counted cases of one (variant, dtype) would have
    convicted (docs/power.md).

    fault: a class of `verify.report.power.FAULTS`.  strength: the least of `cases` passing cases;
    case: the one that says it, of noise the verdict of statistics on all of them; replay: its
    command where it needs more than the id.  tutorial,
    close: what the rules of Triton's tutorial and of torch.testing.assert_close need on the same
    cases; None where there is no closed form.
    """

    variant: str
    dtype: str
    fault: str
    cases: Integer
    strength: Number
    case: str
    tutorial: Number | None
    close: Number | None
    replay: NotRequired[str]
