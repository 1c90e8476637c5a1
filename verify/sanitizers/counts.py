"""Counts: in how many runs each planted fault was caught, over several accounts of runs.

One run has no time to try every fault often enough, and one process has one version of each tool;
`verify sanitize --add` adds up what earlier ones have shown, on the same kind of device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from verify.evidence.strict_json import decode, loads
from verify.sanitizers.account import Account, Count, Further
from verify.sanitizers.tool import INSTRUMENTING, TOOLS

NOT_RUN = "not run"
_Key = tuple[str, str, str, str]  # a planted fault, a tool, its version, what is wanted


def read(paths: Iterable[Path]) -> tuple[Account, ...]:
    """The accounts in those files.  Raises ValueError for one that holds none."""
    accounts = []
    for path in paths:
        try:
            accounts.append(decode(Account, loads(path.read_bytes())))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no account of a run: {error}") from None
    return tuple(accounts)


def tool_version(account: Account | Further, tool: str) -> str:
    """The version of one of an account's tools; "" for delays, which are the suite's own."""
    if tool in INSTRUMENTING:
        return f"Triton {account['device'].get('triton')}"
    return f"compute-sanitizer {account['sanitizer']}" if tool in TOOLS else ""


def own(account: Account) -> list[Count]:
    """Those of one run: of what is required of a tool, as often as it was tried."""
    found: dict[_Key, Count] = {}
    for one in account["planted"]:
        if one["wanted"] == "any" or one["outcome"] == NOT_RUN:
            continue
        by = tool_version(account, one["tool"])
        key = one["variant"], one["tool"], by, one["wanted"]
        count = found.setdefault(key, _none(key, [account["run"]]))
        count["tried"] = int(count["tried"]) + int(one.get("tries", 1))
        count["held"] = int(count["held"]) + int(one.get("held", one["holds"]))
    return list(found.values())


def _none(key: _Key, runs: list[str]) -> Count:
    variant, tool, by, wanted = key
    return {
        "variant": variant,
        "tool": tool,
        "by": by,
        "wanted": wanted,
        "held": 0,
        "tried": 0,
        "runs": runs,
    }


def added(now: Account, earlier: Sequence[Account]) -> list[Count]:
    """The counts of an account and of earlier ones, which can have been added up themselves; those
    of another version of a tool are counted apart.

    Raises ValueError, naming the run, if one is of another device, and if a run would be counted
    twice.
    """
    total: dict[_Key, Count] = {}
    seen: dict[str, str] = {}  # a run, and the account that has counted it
    for account in (now, *earlier):
        got, wanted = account["device"].get("name"), now["device"].get("name")
        if got != wanted:
            raise ValueError(f"{account['run']} is of device {got}, and not of {wanted}")
        counts = account.get("counts") or own(account)
        for run in {run for count in counts for run in count["runs"]}:
            if run in seen:
                raise ValueError(f"{run} is counted by {seen[run]} and by {account['run']}")
            seen[run] = account["run"]
        for count in counts:
            by = count.get("by", tool_version(account, count["tool"]))
            key = count["variant"], count["tool"], by, count["wanted"]
            sum_ = total.setdefault(key, _none(key, []))
            sum_["tried"] = int(sum_["tried"]) + int(count["tried"])
            sum_["held"] = int(sum_["held"]) + int(count["held"])
            sum_["runs"] = [*sum_["runs"], *count["runs"]]
    return list(total.values())


def further(now: Account, earlier: Sequence[Account]) -> list[Further]:
    """Earlier runs that tried what this one has not: a tool, another version of one, or a variant,
    config or dtype under one of its own.  Each is shown once."""
    here = _asked(now)
    found: dict[str, Further] = {}
    for account in earlier:
        if not _asked(account) <= here:
            found[account["run"]] = _as_further(account)
        found |= {one["run"]: one for one in account.get("further", [])}
    return list(found.values())


def _asked(account: Account) -> set[tuple[str, ...]]:
    """Its tools with their versions, alone and with what was tried under them."""
    tools = {tool: tool_version(account, tool) for tool in account["tools"]}
    asked: set[tuple[str, ...]] = set(tools.items())
    for one in account["tried"]:
        if one["outcome"] != "not run":
            tool = one["tool"]
            asked.add((tool, tools[tool], one["variant"], one["config"], one["dtype"]))
    return asked


def _as_further(account: Account) -> Further:
    return {
        "run": account["run"],
        "device": account["device"],
        "sanitizer": account["sanitizer"],
        "tools": account["tools"],
        "seconds": account["seconds"],
        "planted": account["planted"],
        "tried": account["tried"],
        "failures": account.get("failures", []),
        "cut": account.get("cut", ""),
    }


def together(now: Account, earlier: Sequence[Account]) -> Account:
    """An account with what earlier ones add to it.  Raises ValueError if one cannot be added."""
    counts = added(now, earlier)
    shown = further(now, [now, *earlier])
    return {**now, "counts": counts, "further": shown}
