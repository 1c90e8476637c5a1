"""Reports of an earlier schema version as reports of today."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verify.report.replays import usual

VERSION = 2
_MEASURED = ("r", "lse_ulp", "bound_ratio")


def upgraded(report: dict[str, Any]) -> dict[str, Any]:
    """A report of version 2, as JSON data, changed in place to version 3.

    Version 2 repeated in every worst case what its id says, and in every oracle the distributions
    of its dtype.  What has not the shape of version 2 stays as it is, for the reader to refuse.
    """
    for entry in (*_worst(report), *_dicts(report.get("power"))):
        entry.pop("problem", None)
        if entry.get("replay") == usual(str(entry.get("case"))):
            del entry["replay"]
    for dtype in _dtypes(report):
        if isinstance(dtype.get("oracles"), list):
            dtype["oracles"] = [_oracle(one) for one in dtype["oracles"]]
    return report | {"schema": VERSION + 1}


def _oracle(oracle: Any) -> Any:
    """An oracle with the largest r of each tensor, in place of their distributions, and without
    what it did not measure."""
    if not isinstance(oracle, dict):
        return oracle
    ratios = oracle.get("tensors")
    if isinstance(ratios, dict):
        ratios = {name: _largest(one) for name, one in ratios.items()}
    fields = (("r", ratios) if name == "tensors" else (name, has) for name, has in oracle.items())
    return {name: has for name, has in fields if name not in _MEASURED or has not in (None, {})}


def _worst(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for dtype in _dtypes(report):
        tensors = dtype.get("tensors")
        if isinstance(tensors, dict):
            for tensor in _dicts([*tensors.values()]):
                yield from _dicts([tensor.get("worst")])


def _dtypes(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for variant in _dicts(report.get("variants")):
        yield from _dicts(variant.get("dtypes"))


def _dicts(found: Any) -> Iterator[dict[str, Any]]:
    """Those of a list that are objects; none of what is no list."""
    if isinstance(found, list):
        yield from (one for one in found if isinstance(one, dict))


def _largest(tensor: Any) -> Any:
    worst = tensor.get("worst") if isinstance(tensor, dict) else None
    return worst.get("r") if isinstance(worst, dict) else None
