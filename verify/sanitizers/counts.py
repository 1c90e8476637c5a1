"""Counts: in how many runs each planted fault was caught, over several accounts of runs.

One run has no time to try every fault often enough; `verify sanitize --add` adds up what earlier
ones have shown, of the same tool on the same kind of device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from verify.evidence.strict_json import decode, loads
from verify.sanitizers.account import Account, Count, Planted

NOT_RUN = "not run"


def read(paths: Iterable[Path]) -> tuple[Account, ...]:
    """The accounts in those files.  Raises ValueError for one that holds none."""
    accounts = []
    for path in paths:
        try:
            accounts.append(decode(Account, loads(path.read_bytes())))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no account of a run: {error}") from None
    return tuple(accounts)


def own(planted: Iterable[Planted], run: str) -> list[Count]:
    """Those of one run: of what is required of a tool, as often as it was tried."""
    found: dict[tuple[str, str, str], Count] = {}
    for one in planted:
        if one["wanted"] == "any" or one["outcome"] == NOT_RUN:
            continue
        key = one["variant"], one["tool"], one["wanted"]
        count = found.setdefault(key, _none(key, run))
        count["tried"] = int(count["tried"]) + 1
        count["held"] = int(count["held"]) + one["holds"]
    return list(found.values())


def _none(key: tuple[str, str, str], run: str) -> Count:
    variant, tool, wanted = key
    return {
        "variant": variant,
        "tool": tool,
        "wanted": wanted,
        "held": 0,
        "tried": 0,
        "runs": [run],
    }


def added(now: Account, earlier: Sequence[Account]) -> list[Count]:
    """The counts of an account and of earlier ones, which can have been added up themselves.

    Raises ValueError, naming the run, if one is of another device, or of another compute-sanitizer
    or Triton; and if a run would be counted twice.
    """
    total: dict[tuple[str, str, str], Count] = {}
    seen: dict[str, str] = {}  # a run, and the account that has counted it
    for account in (now, *earlier):
        for name, got, wanted in _identity(account, now):
            if got != wanted:
                raise ValueError(f"{account['run']} is of {name} {got}, and not of {wanted}")
        counts = account.get("counts") or own(account["planted"], account["run"])
        for run in {run for count in counts for run in count["runs"]}:
            if run in seen:
                raise ValueError(f"{run} is counted by {seen[run]} and by {account['run']}")
            seen[run] = account["run"]
        for count in counts:
            key = count["variant"], count["tool"], count["wanted"]
            sum_ = total.setdefault(key, {**_none(key, ""), "runs": []})
            sum_["tried"] = int(sum_["tried"]) + int(count["tried"])
            sum_["held"] = int(sum_["held"]) + int(count["held"])
            sum_["runs"] = [*sum_["runs"], *count["runs"]]
    return list(total.values())


def _identity(account: Account, now: Account) -> list[tuple[str, object, object]]:
    """(what, of the account, of this run): what must be the same."""
    device, here = account["device"], now["device"]
    return [
        ("device", device.get("name"), here.get("name")),
        ("Triton", device.get("triton"), here.get("triton")),
        ("compute-sanitizer", account["sanitizer"], now["sanitizer"]),
    ]
