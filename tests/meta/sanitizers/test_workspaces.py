"""Workspaces in processes under a tool, where each is an allocation of its own: they hold poison,
and under one tool every case runs over two kinds of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.harness.fake_sanitizer import fake_tool
from tests.harness.laid import laid
from tests.harness.warm_child import warm
from verify.cell.arena import Arena, bits, pattern, plan
from verify.cell.discovery import roster
from verify.cell.isolated_buffers import IsolatedBuffers
from verify.cell.process import PLAIN_CPU
from verify.problem import Problem
from verify.problem.case import Case
from verify.problem.inputs import tensors
from verify.sanitizers.facts import POISON
from verify.sanitizers.lane import GROUP
from verify.sanitizers.planted import FAULTS
from verify.sanitizers.session import Booth, Subject, _sanitized
from verify.sanitizers.tool import POISONED, TOOLS, Sanitizer

PROBLEM = Problem(seqlen_q=2, seqlen_kv=3, head_dim=8, dtype="float32")
KERNELS = """
import os
from functools import partial
from verify.variant import Contract, Support, Variant

KEPT = []

def wanted(args):
    return {"scratch": ((4,), "float32")}

def forward(fault, args, out, lse, workspace):
    if fault == "raises" and "UNDER_TOOL" in os.environ:
        KEPT.append(fault)
        if len(KEPT) > 1:
            raise RuntimeError("no space left")
    if fault != "dirty":
        workspace["scratch"].fill_(2.0)
    out.copy_(-(0.5 * workspace["scratch"][0]).expand(out.shape))
    lse.fill_(0.0)

SUPPORT = Support(dtypes=("float32",), head_dims=(8,), masks=("full",), layouts="contiguous")
VARIANTS = [
    Variant(name=name, family="paper", forward=partial(forward, name), workspace=wanted,
            support=SUPPORT, contract=Contract(deterministic=name != "free"))
    for name in ("dirty", "right", "free", "raises")
]
"""


@pytest.mark.for_ci
@pytest.mark.long(9)
def test_a_kernel_that_reads_its_workspace_first_is_convicted_by_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(monkeypatch)
    (tmp_path / "kernel.py").write_text(KERNELS, encoding="utf-8")
    tool = Sanitizer(str(fake_tool(tmp_path / "tools")), "2025.3.1.0")
    environment = replace(PLAIN_CPU, variables=(("CUDA_VISIBLE_DEVICES", ""),))
    booth = Booth(tool, environment, tmp_path / "files")
    (fault,) = (fault for fault in FAULTS if fault.variant == "planted-dirty-workspace")
    outcomes = {}
    for declaration in roster([tmp_path / "kernel.py"]).declarations:
        config = declaration.configs[0]
        case = Case(declaration.ref, config.name, GROUP, PROBLEM)
        subject = Subject(declaration, config, "float32", (case,))
        judgement = booth.sanitize(POISONED, subject, 0, declaration.name).judgement
        outcomes[declaration.name] = judgement.outcome
        shown = fault.shown_by(judgement)
        if declaration.name == "raises":  # the judge asks again in a fresh process: there is none
            assert "raised: RuntimeError: no space left" in judgement.reasons[0]
        assert (shown is not None) == (declaration.name == "dirty")
        if shown is not None:
            assert (shown.kind, judgement.total) == (POISON, 1)
            assert "reads what it has not written: over other poison, out is -1.3" in shown.text
            assert "and nan in a run with NaN; 16 of 16 elements differ" in shown.text
    assert outcomes == {
        "dirty": "faulty",
        "right": "clean",
        "free": "clean",
        "raises": "inconclusive",
    }


def test_workspaces_hold_poison_but_where_the_tool_looks_for_unwritten_memory(
    tmp_path: Path,
) -> None:
    for tool in TOOLS:
        environment = _sanitized(PLAIN_CPU, tmp_path, poisoned=tool != "initcheck")
        said = dict(environment.variables)["VERIFY_SANITIZER_WORKSPACES"]
        assert said == ("unwritten" if tool == "initcheck" else "poisoned")
    where = plan(PROBLEM, lse=True, workspace={"scratch": ((4,), "float32")})
    arena = Arena()
    try:
        for poison in ("nan", "huge"):
            laid(arena, where, tensors(PROBLEM).named, poison)
            host = torch.from_numpy(arena.bytes)
            separate = IsolatedBuffers(where.slots, host, "cpu", poisoned=True)
            scratch = where["workspace.scratch"].view(separate)  # type: ignore[arg-type]
            assert bits(scratch).equal(bits(pattern(torch.float32, poison)).expand(4))
            scratch.zero_()
            before = host.clone()
            separate.restore()
            assert host.equal(before), "a workspace never comes back"
    finally:
        arena.close()
