"""sanitizer.md and the tables on the terminal, made from sanitizer.json alone."""

from __future__ import annotations

from collections.abc import Sequence

from verify.sanitizers.account import Account, Planted, Tried


def markdown(account: Account) -> str:
    """The account as a page."""
    device = account["device"]
    about = ", ".join(str(device[name]) for name in ("name", "driver") if device.get(name))
    scope = "" if account["whole"] else "\nOnly a part of the collection was tried.\n"
    run = f"run {account['run']}, {account['seconds']:.0f} s"
    head = ("variant", "tool", "processes", "cases", "records", "seconds", "verdict")
    parts = [
        "# Sanitizers",
        f"compute-sanitizer {account['sanitizer']} on {about}; {run}.\n{scope}",
        "## Planted faults",
        (
            "Tried in the same run, in the same way. A tool that misses what it must catch makes"
            " the whole run fail.\n"
        ),
        _table(("planted", "what", *account["tools"]), matrix(account)),
        "## Kernels",
        _table(head, rows(account["tried"])),
        "## Exceptions",
        _exceptions(account),
    ]
    findings = [f"- `{id_}` {tool}: {outcome}" for id_, tool, outcome in _failing(account["tried"])]
    parts += ["## Findings", "\n".join(findings) + "\n" if findings else "None.\n"]
    not_run = [f"- {one['variant']}: {one['reason']}" for one in account["not_run"]]
    parts += ["## Not run", "\n".join(not_run) + "\n"] if not_run else []
    return "\n".join(part if part.endswith("\n") else part + "\n" for part in parts)


def rows(tried: Sequence[Tried]) -> list[tuple[str, ...]]:
    """Per variant and tool: processes, cases, records, seconds, the worst outcome."""
    lines = []
    for variant, tool in dict.fromkeys((t["variant"], t["tool"]) for t in tried):
        of_pair = [t for t in tried if (t["variant"], t["tool"]) == (variant, tool)]
        outcomes = [outcome for t in of_pair for outcome in t["cases"].values()]
        bad = [outcome for outcome in outcomes if outcome != "clean"]
        result = f"{len(bad)} of {len(outcomes)} {'/'.join(sorted(set(bad)))}"
        processes = [process for t in of_pair for process in t["processes"]]
        numbers = (len(processes), len(outcomes), sum(process["total"] for process in processes))
        seconds = f"{sum(process['seconds'] for process in processes):.0f}"
        verdict = "clean" if outcomes and not bad else result
        lines.append((variant, tool, *map(str, numbers), seconds, verdict))
    return lines


def matrix(account: Account) -> list[tuple[str, ...]]:
    """Per planted kernel: its name, its fault, and each tool's result."""
    lines = []
    for name in dict.fromkeys((one["variant"], one["about"]) for one in account["planted"]):
        planted = [one for one in account["planted"] if (one["variant"], one["about"]) == name]
        by_tool = {one["tool"]: one for one in planted}
        lines.append(
            (*name, *(_word(by_tool[tool]) for tool in account["tools"] if tool in by_tool))
        )
    return lines


def _word(planted: Planted) -> str:
    twin = planted["wanted"] == "clean"
    if planted["record"] is not None and not twin:
        return "caught"
    word = "not seen" if planted["outcome"] == "clean" and not twin else planted["outcome"]
    return word if planted["holds"] else f"{word}, wanted {planted['wanted']}"


def _exceptions(account: Account) -> str:
    if not account["waivers"]:
        return "None: every record counts.\n"
    names = ("tool", "kind", "kernel", "reason", "proof")
    used = [
        (
            w["tool"],
            w["kind"],
            w["kernel"],
            w["reason"],
            w["proof"],
            "dead" if w["dead"] else "used",
        )
        for w in account["waivers"]
    ]
    return _table((*names, ""), used)


def _failing(tried: Sequence[Tried]) -> list[tuple[str, str, str]]:
    outcomes = [(id_, t["tool"], outcome) for t in tried for id_, outcome in t["cases"].items()]
    return [one for one in outcomes if one[-1] != "clean"]


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells]
    return "".join(f"| {line} |\n" for line in lines)
