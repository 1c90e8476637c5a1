"""The builds verdict: what a compiled build breaks of its own declaration."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planted.builds import VARIANT
from verify.bundle import ROOT
from verify.campaign import builds
from verify.campaign.builds import Builder, arches, environment_for, left_out
from verify.cell import preloading
from verify.cell.process import COMPILER, TRITON_COMPILER
from verify.cuda.compile import compilable
from verify.evidence import Built, Recorder, load
from verify.report.resources import by_arch
from verify.variant import Build, Resources, compiled_archs, declaration_from

compiles = pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
DECLARATION = declaration_from(
    VARIANT.describe(),
    ref="builds",
    path=str(ROOT / "tests" / "planted" / "builds.py"),
    source_hash="",
)
NEEDS = Resources(registers=64, shared=0, stack=0, spill_stores=0, spill_loads=0)


def broken(needs: Resources, counts: dict[str, int] | None, **declared) -> list[str]:
    return list(Build("b", lambda: needs, **declared).broken(needs, counts))


class TestDeclaration:
    @pytest.mark.parametrize("change", [{"stack": 8}, {"spill_stores": 4}, {"spill_loads": 4}])
    def test_a_budget_is_for_stack_stores_and_loads(self, change: dict[str, int]) -> None:
        spilling = replace(NEEDS, **change)
        assert not broken(NEEDS, None)
        assert len(broken(spilling, None)) == 1
        assert not broken(spilling, None, spill_budget=8)
        assert not broken(spilling, None, spill_budget=None)

    def test_stores_and_loads_add_up(self) -> None:
        spilling = replace(NEEDS, stack=40, spill_stores=20, spill_loads=24)
        assert not broken(spilling, None, spill_budget=44)
        (said,) = broken(spilling, None, spill_budget=43)
        assert "spills 20 + 24 bytes" in said
        assert "budget is 43" in said

    def test_an_expected_instruction_is_there(self) -> None:
        expects = ("HMMA", "LDSM")
        assert not broken(NEEDS, {"HMMA": 4, "LDSM": 1}, expects=expects)
        assert not broken(NEEDS, None, expects=expects)  # not read: the report says so
        (said,) = broken(NEEDS, {"HMMA": 4}, expects=expects)
        assert said.startswith("has no LDSM instruction")

    def test_local_memory_fails_only_without_a_budget(self) -> None:
        (said,) = broken(NEEDS, {"LDL": 2, "STL": 1})
        assert said.startswith("has 2 LDL and 1 STL instructions")
        assert not broken(NEEDS, {"LDL": 2, "STL": 1}, spill_budget=8)

    def test_a_declaration_is_checked(self) -> None:
        with pytest.raises(ValueError, match=r"^spill_budget: -1 is no number of bytes"):
            Build("b", lambda: NEEDS, spill_budget=-1)
        with pytest.raises(ValueError, match=r"^expects: 'hmma' is none of MMA, HMMA"):
            Build("b", lambda: NEEDS, expects=("hmma",))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Built]]:
    """Failures and records of the planted builds, compiled in a kernel process."""
    folder = tmp_path_factory.mktemp("builds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERIFY_CUDA_CACHE", str(folder / "cache"))
        with Recorder(folder, "gw0-builds") as recorder:
            builder = Builder(recorder, "gpu")
            failures = builder.compile(DECLARATION, "sm_90a")
            builder.close()
    return failures, {built.build: built for built in load(folder).builds}


@compiles
class TestPlantedBuilds:
    def test_what_is_not_as_declared_fails(self, compiled) -> None:
        failures, records = compiled
        wrong = [name for name, built in records.items() if built.error]
        assert wrong == ["default-plain", "default-spilling"]
        assert len(failures) == 2
        spilling, plain = failures
        assert spilling.startswith(
            "builds: default-spilling is not what it declares for sm_90a: spills "
        )
        assert "its budget is 0" in spilling
        assert " LDL and " in spilling
        assert plain.endswith("has no LDGSTS instruction, which Build(expects=...) declares")

    def test_what_is_as_declared_passes(self, compiled) -> None:
        _, records = compiled
        right, budgeted = records["default-right"], records["default-budgeted"]
        assert right.resources["shared"] == 1024 + 64
        assert (right.spill_budget, budgeted.spill_budget) == (0, 4096)
        assert 0 < budgeted.resources["spill_stores"] < 4096

    def test_instructions_are_on_record(self, compiled) -> None:
        _, records = compiled
        counts = records["default-right"].sass
        assert counts["loop"] | {"HMMA": 1, "MMA": 1, "LDSM": 1, "LDGSTS": 1} == counts["loop"]
        assert counts["loop"]["total"] < counts["kernel"]["total"]
        resources = records["default-resources"]
        assert (resources.sass, resources.unread) == (None, "its compile() returns no binary")
        assert resources.code == ""
        codes = {name: record.code for name, record in records.items() if record.code}
        # Two builds are of one source, with two budgets: three binaries, three hashes.
        assert codes["default-spilling"] == codes["default-budgeted"]
        assert (len(codes), len(set(codes.values()))) == (4, 3)

    def test_the_report_says_all_of_it(self, compiled) -> None:
        _, records = compiled
        (row,) = by_arch(records.values(), ["default"])
        assert (row["builds"], row["compiled"]) == (5, 3)
        assert row["failing"] == ["default-plain", "default-spilling"]
        assert (row["unread"], row["unread_reason"]) == (1, "its compile() returns no binary")
        (config,) = row["instructions"]
        assert (config["config"], config["builds"], config["mma"]) == ("default", 4, ["HMMA"])
        low, high = config["other_loop"]
        assert 1 < low < high  # spills are instructions


@compiles
def test_later_binaries_are_not_disassembled_once_the_time_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But every build is compiled, and held to its budget."""
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builds, "_DISASSEMBLY", {"gpu": 0.0})
    with Recorder(tmp_path, "gw0-builds") as recorder:
        builder = Builder(recorder, "gpu")
        failures = builder.compile(DECLARATION, "sm_90a")
        builder.close()
    records = {built.build: built for built in load(tmp_path).builds}
    assert [name for name, built in records.items() if built.sass] == ["default-right"]
    assert records["default-plain"].unread == "left out, for want of time"
    assert [failure.split()[1] for failure in failures] == ["default-spilling"]


def test_the_compiler_of_triton_kernels_is_imported_once_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("import triton\n", encoding="utf-8")
    triton = replace(DECLARATION, path=str(path))
    assert environment_for([DECLARATION, triton]) is TRITON_COMPILER
    assert environment_for([DECLARATION]) is COMPILER
    imported = []
    monkeypatch.setattr(preloading, "_triton_compiler", lambda: imported.append(1))
    monkeypatch.setattr(preloading.gc, "freeze", lambda: None)
    monkeypatch.setattr(preloading.torch, "set_num_threads", lambda count: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    preloading.preload(COMPILER.preloads)
    assert not imported
    preloading.preload(TRITON_COMPILER.preloads)
    assert imported


def test_ci_deals_the_architectures_to_the_variants_of_a_family() -> None:
    """Every variant is compiled for the leading architecture and for another or more, every
    architecture for a third of each family's variants or more, two variants meeting all; what is
    left out is said."""
    told = {"a": 7, "b": 1, "c": 2, "d": 3}  # a family, and how many variants it has
    declarations = [
        replace(DECLARATION, family=family, ref=f"{family}{number}")
        for family, count in told.items()
        for number in range(count)
    ]
    silent = replace(DECLARATION, ref="no builds", compiles=False)
    chosen = arches("ci", [silent, *declarations])
    assert list(chosen) == [each.ref for each in declarations]
    for ref, archs in chosen.items():
        assert "sm_90a" in archs
        assert len(archs) >= 2
        missing = [arch for arch in compiled_archs() if arch not in archs]
        assert left_out("ci", archs) == (
            f"not compiled for {', '.join(missing)}: profile ci leaves these to larger ones"
        ), ref
    for arch in compiled_archs():
        met = Counter(ref[0] for ref, archs in chosen.items() if arch in archs)
        assert all(met[family] >= count // 3 for family, count in told.items())
        assert met["c"] >= 1
    for profile, archs in (("dev", ("sm_90a",)), ("gpu", compiled_archs())):
        assert set(arches(profile, declarations).values()) == {archs}


def test_dev_compiles_one_variant_of_each_file_of_the_collection() -> None:
    """And of the CuTe variants, if there are some for Hopper alone, only those: what is left out
    is said, and compiled by every other profile and where the file is named."""
    hopper = replace(DECLARATION.support, capability=(9, 0), max_capability=(9, 0))
    told = {  # ref: family, file, support
        "first": ("ptx", "a.py", DECLARATION.support),
        "twin": ("ptx", "a.py", DECLARATION.support),
        "any": ("cute", "b.py", DECLARATION.support),
        "hopper": ("cute", "c.py", hopper),
        "hopper twin": ("cute", "c.py", hopper),
        "hopper other": ("cute", "d.py", hopper),
    }
    declarations = [
        replace(DECLARATION, ref=ref, family=family, path=path, support=support)
        for ref, (family, path, support) in told.items()
    ]

    def compiled(profile: str, **options: bool) -> list[str]:
        chosen = arches(profile, declarations, **options)
        assert list(chosen) == list(told)
        return [ref for ref, archs in chosen.items() if archs]

    assert compiled("dev", first_look=True) == ["first", "hopper", "hopper other"]
    for profile in ("dev", "ci", "gpu", "nightly"):
        assert compiled(profile) == list(told)
    assert left_out("dev", ()).startswith("not compiled for sm_80, ")
    declarations = [each for each in declarations if not each.ref.startswith("hopper")]
    chosen = arches("dev", declarations, first_look=True)
    assert [ref for ref, archs in chosen.items() if archs] == ["first", "any"]


@compiles
@pytest.mark.parametrize(("arch", "compiled"), [("sm_90a", 5), ("sm_80", 1)])
def test_a_small_machine_spends_its_time_on_one_architecture(
    arch: str, compiled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the others the first build is compiled, and the rest is on record as listed."""
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builds, "_SECONDS", {"ci": 600.0})
    with Recorder(tmp_path, "gw0-builds") as recorder:
        builder = Builder(recorder, "ci")
        builder.compile(DECLARATION, arch)
        builder.close()
    records = load(tmp_path).builds
    assert len(records) == 5
    assert sum(built.resources is not None for built in records) == compiled
