"""From builds that were compiled and never run to one row per architecture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from verify.document import text
from verify.evidence import Built
from verify.evidence.strict_json import Number
from verify.report.schema import BuildsReport, InstructionsReport, SameReport
from verify.variant import Config, compiled_archs

# Kinds of instructions whose numbers are told: loads of matrices, asynchronous copies, tensor
# copies, special functions, and accesses to memory that stands in for registers.
KINDS = ("LDSM", "LDGSTS", "UTMALDG", "MUFU", "LDL", "STL")

_MESSAGE = 4000  # characters of a compiler's message


def by_arch(builds: Iterable[Built], configs: Sequence[str] = ()) -> list[BuildsReport]:
    """The builds of one variant, by architecture in the order of `compiled_archs`.

    configs: names of the variant's configs, of which a build's name holds one.
    """
    found: dict[str, list[Built]] = defaultdict(list)
    for build in builds:
        found[build.arch].append(build)
    known = {arch: place for place, arch in enumerate(compiled_archs())}
    return [
        _one_arch(arch, found[arch], configs)
        for arch in sorted(found, key=lambda arch: (known.get(arch, len(known)), arch))
    ]


def _one_arch(arch: str, builds: list[Built], configs: Sequence[str]) -> BuildsReport:
    same = same_configs(builds)
    twins = {entry["config"] for entry in same}
    builds = [b for b in builds if _config_and_rest(b.build)[0] not in twins]
    builds = sorted(builds, key=lambda b: b.build)
    failing = [b for b in builds if b.error]
    spilling = {b.build: b.resources for b in builds if b.resources and _spilled(b.resources)}
    worst = max(spilling, key=lambda name: _spilled(spilling[name]), default="")
    budgets = {b.build: b.spill_budget for b in builds}
    unread = [b.unread for b in builds if b.unread]
    return {
        "arch": arch,
        "builds": len(builds),
        "compiled": sum(b.resources is not None and not b.error for b in builds),
        "failing": [b.build for b in failing],
        "error": text.shorter(failing[0].error, _MESSAGE) if failing else "",
        "registers": _largest(builds, "registers"),
        "shared": _largest(builds, "shared"),
        "stack": _largest(builds, "stack"),
        "spilling": len(spilling),
        "spill_build": worst,
        "spill_stores": spilling[worst].get("spill_stores", 0) if worst else 0,
        "spill_loads": spilling[worst].get("spill_loads", 0) if worst else 0,
        "spill_budget": budgets.get(worst),
        "seconds": sum(b.seconds for b in builds),
        "instructions": _by_config(builds, configs),
        "kinds": _kinds([b.sass["kernel"] for b in builds if b.sass is not None]),
        "unread": len(unread),
        "unread_reason": text.shorter(unread[0], _MESSAGE) if unread else "",
        "same": same,
    }


def same_configs(builds: Iterable[Built]) -> list[SameReport]:
    """The configs whose compiled builds have, each of them, the binary of the build of one other
    config that differs in nothing else; of one variant and architecture.

    The other config is one listed earlier that is not itself the same as a third.  A config with a
    failing build counts by itself, and so does one of whose builds none can be compared.
    """
    found: dict[str, dict[str, Built]] = {}
    for build in builds:
        config, rest = _config_and_rest(build.build)
        if config and (build.error or build.resources):
            found.setdefault(config, {})[rest] = build
    same: list[SameReport] = []
    kept: list[str] = []
    for config, own in found.items():
        others = (o for o in kept if all(_alike(b, found[o].get(r)) for r, b in own.items()))
        other = next(others, None)
        if other is None:
            kept.append(config)
        else:
            same.append({"config": config, "other": other, "builds": len(own)})
    return same


def _alike(one: Built, other: Built | None) -> bool:
    """Whether two builds have one binary, and nothing is wrong with either."""
    return other is not None and one.code == other.code != "" and not one.error and not other.error


def _config_and_rest(name: str) -> tuple[str, str]:
    """A build's name in two parts, its config and what follows; without a config in front "" and
    the name."""
    config, _, rest = name.partition(", ")
    try:
        Config.parse(config)
    except ValueError:
        return "", name
    return config, rest


def _by_config(builds: list[Built], configs: Sequence[str]) -> list[InstructionsReport]:
    """What the builds of each config and kind of MMA execute for each MMA; builds without MMA are
    not counted."""
    found: dict[tuple[str, tuple[str, ...]], list[dict[str, dict[str, int]]]] = defaultdict(list)
    for build in builds:
        if build.sass is not None and build.sass["kernel"].get("MMA"):
            named = [config for config in configs if config in build.build]
            kinds = (k for k in build.sass["kernel"] if k.endswith("MMA") and k != "MMA")
            found[max(named, key=len, default=""), tuple(sorted(kinds))].append(build.sass)
    return [
        {
            "config": config,
            "builds": len(sass),
            "mma": list(kinds),
            "other": _range(map(_other, _parts(sass, "kernel"))),
            "other_loop": _range(map(_other, _parts(sass, "loop"))),
            "arithmetic": _range(map(_arithmetic, _parts(sass, "kernel"))),
            "arithmetic_loop": _range(map(_arithmetic, _parts(sass, "loop"))),
        }
        for (config, kinds), sass in sorted(found.items(), key=lambda item: item[0])
    ]


def _kinds(kernels: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """The smallest and largest number of each kind in a kernel; nothing of no kernel."""
    numbers = {kind: [counts.get(kind, 0) for counts in kernels] for kind in KINDS if kernels}
    return {kind: [min(each), max(each)] for kind, each in numbers.items()}


def _parts(sass: Iterable[dict[str, dict[str, int]]], part: str) -> Iterable[Mapping[str, int]]:
    return (counts[part] for counts in sass if counts[part].get("MMA"))


def _other(counts: Mapping[str, int]) -> float:
    """Instructions other than MMA for each MMA."""
    return (counts["total"] - counts["MMA"]) / counts["MMA"]


def _arithmetic(counts: Mapping[str, int]) -> float:
    """FP32 and integer instructions for each MMA."""
    return (counts.get("FP32", 0) + counts.get("INT", 0)) / counts["MMA"]


def _range(ratios: Iterable[float]) -> list[Number]:
    """Smallest and largest, or nothing of nothing."""
    known = [round(ratio, 3) for ratio in ratios]
    return [min(known), max(known)] if known else []


def _largest(builds: Iterable[Built], name: str) -> int | None:
    return max(
        (b.resources[name] for b in builds if b.resources and name in b.resources), default=None
    )


def _spilled(resources: dict[str, int]) -> int:
    """Bytes per thread that are stored and loaded for want of registers."""
    return resources.get("spill_stores", 0) + resources.get("spill_loads", 0)
