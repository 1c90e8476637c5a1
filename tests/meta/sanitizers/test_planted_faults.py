"""Planted faults and known-bad copies: what is planted, and that a compiler keeps it."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.meta.sanitizers.test_sanitizer_lane import declared
from tests.planted import (
    algebra,
    copies,
    gluon_cluster_forward,
    gluon_forward,
    gluon_fp8_forward,
    gluon_turnstile,
    tiny,
    tiny_gluon,
    tiny_partitions,
)
from verify.bundle import ROOT
from verify.cuda.compile import compilable, compile_source
from verify.cuda.edits import edited
from verify.cuda.sass import listing
from verify.cuda.toolkit import executables
from verify.evidence import Recorder
from verify.sanitizers import lane
from verify.sanitizers.facts import Judgement
from verify.sanitizers.planted import (
    COPIES,
    FAULTS,
    GLUON_COPIES,
    SLIPS,
    planted_problem,
)
from verify.sanitizers.tool import ALL, CONSAN, EVERY, SKEW, TOOLS

torch.set_num_threads(1)

GLUON_FILES = [
    path
    for path in sorted((ROOT / "kernels" / "gluon").glob("hopper_*.py"))
    if "\nVARIANT" in path.read_text(encoding="utf-8")
]
BY_NAME = {fault.variant: fault for fault in FAULTS}


def test_every_tool_has_a_fault_to_catch_and_a_twin_to_leave_alone() -> None:
    for tool in EVERY:
        assert any(tool in fault.caught_by for fault in FAULTS)
    assert any(fault.twin for fault in FAULTS)
    assert {fault.variant for fault in FAULTS} == {
        *tiny.FAULTS,
        *tiny_gluon.KINDS,
        tiny_partitions.VARIANT.name,
        *(variant.name for variant in algebra.VARIANTS),
        *(fault.variant for fault in GLUON_COPIES),
        *(variant.name for variant in copies.VARIANTS),
    }
    for fault in FAULTS:
        assert fault.twin + bool(fault.caught_by) + bool(fault.unseen) == 1
        wanted = [fault.wanted(tool) == "any" and not fault.spare for tool in EVERY]
        assert [bool(fault.blind(tool)) for tool in EVERY] == wanted
        assert set(fault.caught_by) <= set(fault.tried_under(ALL))
        own = {SKEW} if fault.by_triton and not fault.spare else {*TOOLS, *fault.caught_by}
        assert set(fault.tried_under(EVERY)) <= own or fault.twin
    files = gluon_forward, gluon_turnstile, gluon_fp8_forward, gluon_cluster_forward
    copied = {variant.name for file in files for variant in file.VARIANTS}
    assert {fault.variant for fault in GLUON_COPIES} < copied


def test_every_gluon_variant_for_hopper_has_copies() -> None:
    modules = [import_module(f"kernels.gluon.{path.stem}") for path in GLUON_FILES]
    shipped = {module.VARIANT.name for module in modules}
    assert {fault.copy_of for fault in GLUON_COPIES} == shipped
    for name in shipped:
        tools = {tool for f in GLUON_COPIES if f.copy_of == name for tool in f.caught_by}
        assert tools in ({"memcheck", CONSAN}, {"memcheck", SKEW})


def test_every_cuda_variant_has_a_copy_for_each_slip() -> None:
    files = (path for path in (ROOT / "kernels").glob("*/*.cu") if path.with_suffix(".py").exists())
    modules = [import_module(f"kernels.{path.parent.name}.{path.stem}") for path in files]
    shipped = {v.name for m in modules for v in getattr(m, "VARIANTS", None) or [m.VARIANT]}
    assert {fault.copy_of for fault in COPIES} == shipped
    assert len(COPIES) == len(SLIPS) * len(shipped)
    assert {variant.name for variant, _ in copies.SHIPPED} == shipped


def test_a_spare_copy_is_tried_under_its_own_tool_alone() -> None:
    (spare,) = (fault for fault in COPIES if fault.variant == "planted-share-kv-overrun")
    assert spare.tried_under(EVERY) == ("memcheck",)
    assert spare.tried_under(("racecheck",)) == ()
    assert spare.holds("memcheck", Judgement("clean"))


@pytest.mark.for_ci
@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
def test_planted_kernels_compile_and_differ_from_what_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path))
    variant, tiling = copies.SHIPPED[0]
    assert tiling is not None
    config = copies.config_of(variant, tiling)
    shipped = tiling.launch(config, "float16", 64, "full", "strided", narrow=False).source
    sources = [tiny.source(name) for name in tiny.FAULTS]
    sources += [shipped, *(edited(shipped, [slip]) for slip in copies.PTX_SLIPS.values())]
    assert len({compile_source(source, "sm_90a").cubin for source in sources}) == len(sources)


# What a compiler could take away: an opcode of the faulty instruction, and how often it occurs.
OPCODES = {
    "planted-misaligned-load": (r"LDG\.E\.128\b.*\+0x4\]", 1),
    "planted-missing-barrier": (r"BAR\.SYNC", 0),
    "planted-early-copy-read": (r"LDGSTS\.E", 1),
    "planted-missing-mbarrier-wait": (r"SYNCS\.ARRIVE", 1),
    "planted-divergent-barrier": (r"@!?P\d BAR\.SYNC", 1),
    "planted-unwritten-shared": (r"LDS", 1),
    "planted-dirty-workspace": (r"FMUL.* 0\.5", 1),
    "planted-correct": (r"(?<!P\d )BAR\.SYNC", 1),
}


@pytest.mark.first_look(2)
@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
@pytest.mark.skipif(not executables("nvdisasm"), reason="no nvdisasm")
@pytest.mark.parametrize("variant", OPCODES)
def test_the_compiler_keeps_a_planted_fault(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path))
    text = listing(compile_source(tiny.source(variant), "sm_90a").cubin)
    opcode, times = OPCODES[variant]
    assert len(re.findall(opcode, text)) == times
    waits = len(re.findall(r"DEPBAR\.LE|SYNCS\.PHASECHK", text))
    assert waits == 0  # for no copy, and at no mbarrier


def test_a_fault_of_the_memory_is_made_at_the_launch() -> None:
    q = torch.zeros(4)
    for variant, fault in tiny.FAULTS.items():
        workspace = {"scratch": torch.zeros(4)}
        address, held = tiny.memory(variant, q, workspace)
        assert (address == q.data_ptr()) == (fault not in ("freed", "unwritten", "HALVED"))
        assert (address == held.data_ptr()) == (fault != "freed")
    assert len(tiny._leaked) == 1


def test_the_planted_problem_lies_inside_every_planted_support() -> None:
    files = gluon_forward, gluon_turnstile, gluon_fp8_forward, gluon_cluster_forward
    gluon = [variant for file in files for variant in file.VARIANTS]
    small = (*tiny.VARIANTS, *tiny_gluon.VARIANTS, tiny_partitions.VARIANT)
    planted = (*small, *gluon, *copies.VARIANTS)
    for variant in planted:
        problem = planted_problem(declared(variant.support, tuple(variant.configs)))
        assert variant.support.refusal(problem) is None
        assert problem.seqlen_q % 64  # an overrun by one row needs a ragged tile


def test_every_planted_kernel_begins_once_before_any_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, str]] = []

    class Booth:
        """Notes the sessions in the order in which they begin; finds every kernel clean."""

        environment, folder = None, tmp_path

        def sanitize(self, tool: str, subject: object, lane: int, name: str) -> object:
            begun.append((name.removeprefix("planted-"), tool))
            return SimpleNamespace(tool=tool, judgement=Judgement("clean"), built=0.0, hang=None)

    race = SimpleNamespace(tool=SKEW, judgement=Judgement("clean"), built=0.0, hang=None)
    subject = SimpleNamespace(declaration=SimpleNamespace(ref="planted"))
    monkeypatch.setattr(lane, "race", lambda environment, subject, **_: race)
    monkeypatch.setattr(lane, "_planted_subjects", lambda faults: dict.fromkeys(BY_NAME, subject))
    with Recorder(tmp_path) as recorder:
        lane.Lane(cast(Any, Booth()), recorder, TOOLS, 1).plant(FAULTS)
    wanted = {(name, tool) for name, fault in BY_NAME.items() for tool in fault.tried_under(TOOLS)}
    assert (set(begun), len(begun)) == (wanted, len(wanted))
    names = [name for name, _ in begun]
    tried = sum(bool(fault.tried_under(TOOLS)) for fault in FAULTS)
    assert len(set(names[:tried])) == tried  # each once, before any of them again
    cute = [number for number, name in enumerate(names[:tried]) if "cute" in name]
    assert max(cute) < names.index("planted-split-q-overrun")
