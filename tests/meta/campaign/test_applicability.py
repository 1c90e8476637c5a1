"""The committed pages list which oracle judges which variant, and the property of each oracle."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from references.premises import Premise
from tests.harness.declared import flat_numerics
from tests.harness.fake_trials import DECLARED
from verify.campaign import applicability, derivations
from verify.cell.discovery import roster
from verify.oracles import by_module, oracles


@pytest.fixture(scope="module")
def table() -> str:
    return applicability.table(roster().declarations)


@pytest.mark.for_ci
def test_the_committed_table_is_current(table: str) -> None:
    committed = applicability.PATH.read_text(encoding="utf-8")
    assert table == committed, f"write it again with `{derivations.COMMAND}`"


def test_the_committed_derivations_are_current() -> None:
    committed = derivations.PATH.read_text(encoding="utf-8")
    assert derivations.page() == committed, f"write it again with `{derivations.COMMAND}`"


def test_every_oracle_is_explained() -> None:
    """Each oracle has a derivation: its module's docstring has more than one paragraph."""
    text = derivations.page()
    for oracle in oracles():
        assert f"\n- **{oracle.name}** (group {oracle.group}, " in text
    assert sum(map(len, by_module().values())) == len(oracles())
    for module, own in by_module().items():
        assert f"\n## {own[0].name}\n" in text
        assert len((module.__doc__ or "").split("\n\n")) > 1, f"{module.__name__} derives nothing"


def test_the_pages_that_a_derivation_names_exist() -> None:
    text = derivations.page()
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", text))
    assert {"tolerance.md", "tolerance-backward.md", "applicability.md"} <= named
    assert all((derivations.PATH.parent / page).is_file() for page in named)
    assert "docs/" not in text


def test_what_is_left_out_has_its_reason() -> None:
    by_name = {(oracle.name, oracle.group): oracle for oracle in oracles()}
    merging = replace(DECLARED, ref="merging", numerics=flat_numerics(split_keys=True))
    assert applicability.reason(DECLARED, by_name["dyadic", "dyadic"]) is None
    assert (
        applicability.reason(merging, by_name["dyadic", "dyadic"])
        == "merges parts by a rounded LSE"
    )
    assert (
        applicability.reason(DECLARED, by_name["gradient_sums", "gradients"])
        == "has no backward of its own"
    )
    table = applicability.table([merging, DECLARED])
    assert "- **dyadic**: merging. Reason: merges parts by a rounded LSE.\n" in table
    assert "no backward of its own" not in table
    assert f"**: {DECLARED.ref}. " not in table


def test_features_are_columns_and_what_is_not_asked_has_its_premise() -> None:
    table = applicability.table([])
    scales = " | ".join(f"descales by {word}" for word in ("tensor", "head", "block64", "block128"))
    stored = "transposed storage | transposedv storage"
    assert f"| oracle | group | softcap | {scales} | {stored} | output in 8 bits |\n" in table
    assert f"| bound | accuracy |{8 * ' yes |'}\n" in table
    broken = "no: needs factors_by_head"
    row = f"no: needs linear_scores | yes | yes | {broken} | {broken} | yes | yes | yes |"
    assert f"| key_shift | key_shift | {row}\n" in table
    offsets = r"\| no: needs strided_storage \| yes \|\n"
    assert re.search(rf"\| long_offsets \|.*{offsets}", table)


def test_a_feature_that_a_variant_cannot_do_without_is_a_reason() -> None:
    by_name = {(oracle.name, oracle.group): oracle for oracle in oracles()}
    support = replace(DECLARED.support, dtypes=("float8_e4m3fn",), descalings=("tensor",))
    scaled = replace(DECLARED, support=support)
    plain = replace(by_name["key_shift", "key_shift"], needs=frozenset({Premise.PLAIN_INPUTS}))
    words = "needs plain_inputs, which descales by tensor breaks"
    assert applicability.reason(scaled, plain) == words
    assert applicability.reason(DECLARED, plain) is None
