"""The import rule of docs/architecture.md: a room imports rooms on lower floors, and no circle is
left.

Imports inside functions count as well: a late import hides a circle, it does not remove it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.meta.conftest import ASK_FOR_THE_DEVICE
from verify.bundle import ROOT

# From the lowest floor up.  Rooms of one floor do not import each other.
FLOORS = (
    ("verify.brief", "verify.bundle", "verify.document"),
    ("verify.machine", "verify.bootstrap", "references"),
    ("verify.evidence",),
    ("verify.arithmetic",),
    ("verify.variant",),
    ("verify.cuda", "verify.adapters"),
    ("kernels",),
    ("verify.problem",),
    ("verify.tolerance",),
    ("verify.cell",),
    ("verify.judging",),
    ("verify.statistics", "verify.timing"),
    ("verify.oracles", "verify.probes", "verify.sanitizers"),
    ("verify.profiling",),
    ("verify.report",),
    ("verify.campaign",),
    ("verify.cli", "verify.door"),
    ("verify.__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

Imports = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the three packages, by its name; `verify` itself aside, which is empty."""
    found = {}
    for top in ("verify", "references", "kernels"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    del found["verify"]
    return found


def imports_of(text: str, known: Mapping[str, object]) -> set[str]:
    """The modules among `known` that a source file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys()


def room_of(module: str) -> str:
    """The room of FLOORS in which that module stands; raises KeyError where it stands in none."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    for name in names:
        if name in FLOOR_OF:
            return name
    raise KeyError(f"{module} stands in no room: add its folder to FLOORS and docs/architecture.md")


def forbidden(imports: Imports) -> Iterator[str]:
    """Arrows that do not lead to a lower floor, as text."""
    for module, targets in sorted(imports.items()):
        for target in sorted(targets):
            here, there = room_of(module), room_of(target)
            if here != there and FLOOR_OF[there] >= FLOOR_OF[here]:
                yield f"{module} -> {target}: {there} is not below {here}"


def circles(imports: Imports) -> Iterator[str]:
    """Modules that import each other, the shortest way round from each, as text."""
    for start in sorted(imports):
        ways = [[start]]
        seen: set[str] = set()
        while ways:
            way = ways.pop(0)
            for target in sorted(imports[way[-1]]):
                if target == start:
                    yield " -> ".join([*way, start])
                    ways = []
                    break
                if target not in seen:
                    seen.add(target)
                    ways.append([*way, target])


@pytest.fixture(scope="module")
def imports() -> Imports:
    known = modules()
    found = {
        name: imports_of(path.read_text(encoding="utf-8"), known) for name, path in known.items()
    }
    # A package that gathers the names of its own modules is the door of its room, no circle.
    for name, targets in found.items():
        targets -= {
            name,
            *(f"{'.'.join(name.split('.')[:count])}" for count in range(1, name.count(".") + 1)),
        }
    return found


@pytest.mark.for_ci
def test_every_import_leads_to_a_lower_floor(imports: Imports) -> None:
    arrows = list(forbidden(imports))
    assert not arrows, "\n".join(["imports against the rule of docs/architecture.md:", *arrows])


@pytest.mark.for_ci
def test_no_modules_import_each_other(imports: Imports) -> None:
    found = list(circles(imports))
    assert not found, "\n".join(["modules that import each other:", *found])


def test_arrows_and_circles_are_seen() -> None:
    planted = {
        "verify.tolerance.forward": {"verify.oracles.bound"},
        "verify.oracles.bound": {"verify.probes.tree", "references.masks"},
        "verify.probes.tree": set[str](),
        "references.masks": set[str](),
    }
    assert list(forbidden(planted)) == [
        "verify.oracles.bound -> verify.probes.tree: verify.probes is not below verify.oracles",
        (
            "verify.tolerance.forward -> verify.oracles.bound: verify.oracles is not below"
            " verify.tolerance"
        ),
    ]
    assert imports_of(
        "def f():\n    from verify.problem import Problem\n", {"verify.problem": 0}
    ) == {"verify.problem"}
    loop = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert list(circles(loop)) == ["a -> b -> c -> a", "b -> c -> a -> b", "c -> a -> b -> c"]
    with pytest.raises(KeyError, match=r"tests\.meta stands in no room"):
        room_of("tests.meta")


def test_the_page_shows_the_same_floors() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = re.search(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert drawn is not None
    lines = [re.findall(r"[a-z_]+", line[:31]) for line in drawn[1].splitlines() if line.strip()]
    rooms = [{name.rpartition(".")[2] for name in floor} for floor in reversed(FLOORS)]
    assert [set(line) for line in lines] == rooms[1:]  # without __main__, which calls the cli


def test_the_judges_own_tests_know_who_asks_for_the_device() -> None:
    """On a GPU machine, too, they run kernels on the CPU: `kernels_run_on_the_cpu` says so to each
    of these modules."""
    asking = set()
    for module, path in modules().items():
        names = re.findall(r"^from verify\.cell\.discovery import (.*)$", path.read_text(), re.M)
        if any("environment" in line for line in names) and room_of(module) != "verify.cli":
            asking.add(module)
    assert asking | {"verify.cell.discovery"} == set(ASK_FOR_THE_DEVICE)
