"""A first look: what profile dev asks of one target of a file or variant, and says that it does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.fake_trials import DECLARED
from verify.campaign import first_look
from verify.campaign.edge_cases import leading
from verify.campaign.run import CampaignRun
from verify.campaign.targets import Target, targets_of
from verify.oracles import groups
from verify.variant import Config, Declaration

SUPPORT = replace(DECLARED.support, dtypes=("float16", "float32"), devices=("cpu", "cuda"))


def variant(ref: str, path: str) -> Declaration:
    configs = (Config(block_m=16, block_n=32), Config(block_m=64, block_n=32))
    return replace(DECLARED, ref=ref, name=ref, path=path, support=SUPPORT, configs=configs)


LED = (*(Config(block_m=16, block_n=n) for n in (64, 32)), Config(block_m=64, block_n=128))
TWINS = (variant("one", "a.py"), variant("twin", "a.py"), variant("other", "b.py"))


def ids(targets: list[Target]) -> list[str]:
    return [target.id for target in targets]


def test_a_group_of_files_is_asked_of_the_first_target_of_each() -> None:
    for name in ("long", "lengths"):
        every = targets_of(TWINS, name)
        assert len(every) == 12
        kept = first_look.asked(name, every)
        assert ids(kept) == ["one-m16n32-float16", "other-m16n32-float16"]
    kept = first_look.asked("contract", targets_of(TWINS, "contract"))
    assert [target.declaration.ref for target in kept] == ["one", "twin", "other"]
    every = targets_of(TWINS, "refusal")
    assert first_look.asked("refusal", every) == every


@pytest.mark.parametrize("group", ["accuracy", "gradients"])
def test_bounds_are_asked_of_each_dtype_and_each_config(group: str) -> None:
    declarations = [replace(one, entries=("forward", "backward"), configs=LED) for one in TWINS]
    every = targets_of(declarations, group)
    kept = [t for t in first_look.asked(group, every) if t.declaration.ref == "twin"]
    assert len(every) == 18
    assert {(target.config, target.dtype) for target in kept} == {
        *((LED[1], dtype) for dtype in SUPPORT.dtypes),
        *((config, SUPPORT.dtypes[0]) for config in LED),
    }
    assert {target.id for target in map(_led, kept)} <= set(ids(kept))


def _led(target: Target) -> Target:
    """The target of whose dtype the edge cases are asked."""
    return replace(target, config=leading(target.declaration))


def test_questions_are_shared_out_among_the_targets_of_a_variant() -> None:
    """Each of one target, and each target of one: a question is the same for all of its groups."""
    asked_of: dict[str, set[str]] = {}
    for name, group in groups().items():
        if group.entry == "forward" and (group.family or group.first_look == "question"):
            kept = first_look.asked(name, targets_of(TWINS, name))
            assert [target.declaration.ref for target in kept] == ["one", "twin", "other"]
            asked_of.setdefault(group.family or name, set()).update(ids(kept))
    assert set(asked_of) == {"counting", "exact", "gather", "poison", "relations"}
    assert all(len(found) == 3 for found in asked_of.values())
    of_one = set().union(*asked_of.values()) & {t.id for t in targets_of(TWINS[:1], "accuracy")}
    assert of_one == {"one-m16n32-float16", "one-m16n32-float32", "one-m64n32-float16"}


def test_a_target_that_is_asked_nothing_stands_for_no_other() -> None:
    """A kernel for short sequences has no problem of group long."""
    short = replace(TWINS[0], support=replace(SUPPORT, max_seqlen=64))
    kept = first_look.asked("long", targets_of((short, TWINS[1]), "long"))
    assert [target.declaration.ref for target in kept] == ["twin"]


def test_what_is_left_out_is_told_once_for_each_variant() -> None:
    told = {record.variant: record for record in first_look.left_out(TWINS)}
    assert set(told) == {"one", "twin", "other"}
    assert {record.dtype for record in told.values()} == {"(targets)"}
    assert "larger profiles ask all" in told["twin"].reason
    assert "lengths, long: one-m16n32-float16" in told["twin"].reason
    assert re.search(r"contract(, \w+)*: twin-m16n32-float16", told["twin"].reason)
    bounds = "accuracy: all dtypes of m16n32, the first of each other config"
    assert bounds in told["twin"].reason
    assert re.search(r"counting(, \w+)*: twin-m\d\dn32-float\d\d\b", told["twin"].reason)
    alone = replace(
        TWINS[2], configs=TWINS[2].configs[:1], support=replace(SUPPORT, dtypes=("float16",))
    )
    assert list(first_look.left_out([alone])) == []


@pytest.mark.parametrize(
    ("profile", "files", "options", "asked"),
    [
        ("dev", (), {}, 2),
        ("ci", (), {}, 12),
        ("gpu", (), {}, 12),
        ("nightly", (), {}, 12),
        ("dev", (Path("a.py"),), {}, 12),
        ("dev", (), {"all_configs": True}, 12),
        ("dev", (), {"thorough": True}, 12),
    ],
)
def test_larger_profiles_and_named_files_are_asked_all(
    profile: str, files: tuple[Path, ...], options: dict[str, bool], asked: int, tmp_path: Path
) -> None:
    run = CampaignRun(tmp_path, profile, files, **options)
    run.__dict__["here"] = TWINS  # no file is loaded
    assert len(run.targets("long")) == asked


def test_what_depends_on_a_target_is_asked_of_each() -> None:
    """Numerics, the edges of a support and its witnesses are those of each dtype and config."""
    kinds = {name: group.first_look for name, group in groups().items()}
    assert {name: kind for name, kind in kinds.items() if kind} == {
        "accuracy": "config",
        "gradients": "config",
        "counting": "question",
        "gather": "question",
        "poison": "question",
        "long": "file",
        "long_gradients": "file",
        "lengths": "file",
        "lengths_gradients": "file",
        "contract": "variant",
        "contract_backward": "variant",
    }
    alone = {name for name, kind in kinds.items() if not (kind or groups()[name].family)}
    assert alone == {"declared_numerics", "refusal", "gradient_refusal"}
