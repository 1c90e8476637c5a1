"""Oracles and groups: found from their files, they say what they catch, and name what exists."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from verify import oracles as oracle_package
from verify.bundle import ROOT
from verify.oracles import (
    Group,
    Oracle,
    defined,
    grouped,
    groups,
    of_group,
    oracles,
    ordered,
)

torch.set_num_threads(1)


def test_oracles_are_found_from_their_files() -> None:
    folder = Path(oracle_package.__file__).parent
    declaring = {
        path.stem for path in folder.rglob("*.py") if "\nORACLE" in path.read_text(encoding="utf-8")
    }
    judging = {oracle.judge.__module__.rpartition(".")[2] for oracle in oracles()}
    assert declaring == judging | {"lengths"}, "which asks other files' oracles its own problems"
    assert {"bound", "counting", "gather", "empty_rows", "repeat", "poison", "refusal"} <= declaring


def test_every_oracle_says_what_it_catches_needs_and_belongs_to_a_group() -> None:
    for oracle in oracles():
        assert oracle.needs is not None, f"{oracle.name} names no premises"
        assert len(oracle.catches) > 20
        assert "\n" not in oracle.catches
        assert oracle.group in groups()
        assert oracle in of_group(oracle.group)
    assert all(of_group(group) for group in groups())
    assert len({(oracle.name, oracle.group) for oracle in oracles()}) == len(oracles())
    assert of_group("accuracy")[0].name == "bound", "values are judged before repetitions"


def test_groups_and_oracles_name_only_what_exists() -> None:
    with pytest.raises(
        ValueError, match=r"group mine: entry: 'sideways' is none of forward, backward"
    ):
        Group(name="mine", about="", entry="sideways")
    with pytest.raises(
        ValueError, match=r"group mine: distributions: 'nomal' is none of normal, .*gather"
    ):
        Group(name="mine", about="", distributions=("normal", "nomal"))
    with pytest.raises(ValueError, match=r"group mine: asks: a family's problems are drawn"):
        Group(name="mine", about="", family="exact", asks=lambda declaration, dtype: [])
    mine = Group(name="mine", about="", distributions=("gather",))
    with pytest.raises(ValueError, match=r"group mine: two oracles define"):
        grouped([mine, mine])
    oracle = replace(oracles()[0], name="new", group="mine")
    assert ordered([oracle], grouped([mine])) == (oracle,)
    with pytest.raises(ValueError, match=r"oracle new: group: 'yours' is none of mine"):
        ordered([replace(oracle, group="yours")], grouped([mine]))
    with pytest.raises(ValueError, match=r"oracle new: group mine has two of that name"):
        ordered([oracle, oracle], grouped([mine]))


def test_a_module_may_define_one_group_or_several() -> None:
    one, two, three = (Group(name=name, about="") for name in ("one", "two", "three"))
    module = ModuleType("mine")
    assert defined(module, "GROUP") == ()
    module.GROUPS = (one, two)
    assert defined(module, "GROUP") == (one, two)
    module.GROUP = three
    assert defined(module, "GROUP") == (one, two, three)


def test_every_oracle_is_tried_here() -> None:
    """An oracle that is added must be put on trial here, too."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for oracle in oracles():
        assert f"{oracle.name}.judge(" in text or f'"{oracle.name}"' in text, oracle.name
    assert {f.name for f in fields(Oracle)} == {
        "name",
        "group",
        "catches",
        "judge",
        "excludes",
        "needs",
        "concerns",
        "rank",
        "launches",
        "together",
    }
