"""FPSan: the plain kernel, what is compared with it, and what follows from bits that differ."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from kernels.gluon import hopper_forward
from kernels.triton.compile import compilable, compiled
from references.masks import Causal, parse_mask
from references.quantisation import parse_quantisation
from tests.harness.kernel_files import Writer
from tests.harness.sanitizer_facts import right_facts
from tests.harness.warm_child import warm
from tests.planted import algebra as planted_kernels
from verify.bundle import ROOT
from verify.cell.arena import Arena
from verify.cell.discovery import environment, roster
from verify.cell.process import PLAIN_CPU, Cell, ForkServer
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.problem.case import Case
from verify.sanitizers import algebra, binaries, instrumented, ledger
from verify.sanitizers.binaries import Built
from verify.sanitizers.facts import CaseResult, Judgement
from verify.sanitizers.failures import failures
from verify.sanitizers.lane import _for_tool, excludes
from verify.sanitizers.planted import ALGEBRA, FAULTS
from verify.sanitizers.records import Record
from verify.sanitizers.results import Rehearsed
from verify.sanitizers.session import Session, Subject
from verify.sanitizers.tool import ALL, CONSAN, FPSAN
from verify.variant import AttentionArgs, Config, Declaration, Support

pytestmark = pytest.mark.for_ci

torch.set_num_threads(1)

# The verdict.

RUN = (ledger.Launched("_flash_forward", "kernels/triton/flash_forward.py:230 in forward"),)
DIFFERS = Record(
    tool=FPSAN, kind=algebra.KIND, text="under FPSan out is 1", words="the plain kernel"
)
EQUAL = right_facts(FPSAN, RUN)
WATCHED = (Built("_flash_forward", 4096, True, True), Built("_copy", 64, False, False))


def test_equal_bits_of_instrumented_kernels_are_clean_and_others_are_a_finding() -> None:
    assert instrumented.judged(EQUAL, WATCHED).outcome == "clean"
    judgement = instrumented.judged(replace(EQUAL, records=(DIFFERS,)), WATCHED)
    assert (judgement.outcome, judgement.records, judgement.total) == ("faulty", (DIFFERS,), 1)


@pytest.mark.parametrize(
    ("changed", "built", "why"),
    [
        ({}, None, "no readable ledger of its builds"),
        ({}, (), "no kernel was instrumented"),
        ({}, (replace(WATCHED[0], changed=False),), "no kernel was instrumented"),
        ({}, (WATCHED[0], Built("_merge", 0, False, True)), "_merge was not instrumented"),
        ({"exit_code": 1}, WATCHED, "exit code 1"),
        ({"launches": ((),)}, WATCHED, "launched no kernel"),
        ({"results": ()}, WATCHED, "0 of 1 cases were run"),
        ({"results": (CaseResult("case", "ok", "two runs differ"),)}, WATCHED, "two runs differ"),
        ({"results": (CaseResult("case", "hang", "hangs"),)}, WATCHED, "hang"),
        ({"doubts": ("it did not connect",)}, WATCHED, "did not connect"),
    ],
)
@pytest.mark.parametrize("records", [(), (DIFFERS,)])
def test_bits_prove_nothing_where_a_fact_is_in_doubt(
    changed: dict[str, Any],
    built: tuple[Built, ...] | None,
    why: str,
    records: tuple[Record, ...],
) -> None:
    judgement = instrumented.judged(replace(EQUAL, **changed, records=records), built)
    assert judgement.outcome == "inconclusive"
    assert any(why in reason for reason in judgement.reasons), judgement.reasons


@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8), reason="this Triton has FPSan"
)
@pytest.mark.long(4)
def test_a_triton_without_fpsan_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "launches.jsonl"
    monkeypatch.setenv(ledger.VARIABLE, str(path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    given = [torch.empty(2, 64, 64, dtype=torch.float16, device="meta") for _ in range(4)]
    lse = torch.empty(2, 64, device="meta")
    launch = planted_kernels.launch_of("correct", given, lse, 0.125)
    launch.keywords["instrumentation_mode"] = FPSAN
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.instrumentation_mode = FPSAN
        binaries.watch()
        compiled(launch, "sm_90a")
    built = binaries.read(path)
    assert built == (Built("planted_algebra", built[0].shared, False, True),) if built else False
    (doubt,) = binaries.doubts(built, FPSAN)
    assert "no kernel was instrumented" in doubt


# The plain kernel is right.


@pytest.mark.long(8)
@pytest.mark.parametrize(
    "mask",
    [
        "causal",
        pytest.param("full", marks=pytest.mark.thorough),
        pytest.param("lengths.21.30", marks=pytest.mark.thorough),
    ],
)
def test_the_plain_kernel_computes_attention(mask: str) -> None:
    fork_server, arena = ForkServer(environment()), Arena()
    cell = Cell(fork_server)
    problem = Problem(
        heads_q=2,
        seqlen_q=40,
        seqlen_kv=50,
        head_dim=16,
        head_dim_v=24,
        dtype="float32",
        mask=parse_mask(mask),
    )
    try:
        for declaration in algebra._plain():
            entry = declaration.entries[-1]
            config = declaration.configs[0]
            trial = Trial(declaration, config, problem, cell, arena, arch="cpu", entry=entry)
            assert trial.first.reply.ok, trial.first.reply
            exact = trial.truth
            if entry == "backward":
                exact = trial.gradients
            for name, got in trial.first.outputs.items():
                want = getattr(exact, name)
                value = trial.natural_lse(got) if name == "lse" else got.double()
                finite = want.isfinite()
                assert torch.equal(finite, value.isfinite())
                error = (value - want)[finite].abs().max()
                assert float(error) < 1e-5, (declaration.name, name, float(error))
    finally:
        cell.close()
        arena.close()
        fork_server.close()


# What is compared.

EIGHT_BITS = {
    "gluon-hopper-fp8-forward",
    "triton-block-pointer-fp8-forward",
    "triton-fp8-forward",
    "triton-fp8-transposed-forward",
    "triton-fp8-transposed-block-forward",
    "triton-fp8-transposed-wide-forward",
}
COMPARED = {
    "gluon-hopper-forward",
    *EIGHT_BITS,
    "triton-block-pointer-forward",
    "triton-device-descriptor-forward",
    "triton-flash-backward",
    "triton-flash-forward",
    "triton-host-descriptor-forward",
}
LEFT_OUT = {
    "gluon-hopper-cluster-forward": "each CTA",
    "triton-decode-forward": "merges parts",
    "triton-flash-backward-atomic": "atomic",
    "triton-flash-backward-prescaled": "scaled and rounded",
}


def check(support: Support, problem: Problem) -> None:
    """Raise Unsupported unless the problem is inside that support."""
    dtype = getattr(torch, problem.dtype)
    shapes = problem.shape_q, problem.shape_k, problem.shape_v, problem.shape_out
    q, k, v, out = (torch.empty(shape, dtype=dtype) for shape in shapes)
    args = AttentionArgs(
        q=q,
        k=k,
        v=v,
        mask=problem.mask,
        softmax_scale=problem.scale,
        score_mod=None,
        config=Config(),
    )
    replace(support, devices=("cpu",)).check(args, out)


@pytest.fixture(scope="module")
def collection() -> dict[str, Declaration]:
    """The declarations of the collection's Triton and Gluon kernels."""
    files = (
        path for family in ("gluon", "triton") for path in (ROOT / "kernels" / family).iterdir()
    )
    declaring = [path for path in sorted(files) if re.search(r"^VARIANTS?\b", _text(path), re.M)]
    return {declaration.name: declaration for declaration in roster(declaring).declarations}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.suffix == ".py" else ""


def test_every_triton_variant_is_compared_or_left_out_with_a_reason(
    collection: dict[str, Declaration],
) -> None:
    found = collection
    reasons = {name: excludes(FPSAN, each) for name, each in found.items()}
    assert {name for name, reason in reasons.items() if reason is None} - {
        "gluon-blackwell-forward"
    } == COMPARED
    for name, words in LEFT_OUT.items():
        assert words in str(reasons[name])
    for name in COMPARED:
        for dtype in found[name].support.dtypes:
            problems = algebra.problems(found[name], dtype)
            assert len(problems) == 2
            for problem in problems:
                assert algebra.comparable(found[name], found[name].configs[0], problem)
                if name in EIGHT_BITS:
                    assert found[name].support.refusal(problem) is None
                else:
                    check(found[name].support, problem)
        assert algebra.plain_of(found[name]).contract.lse in (found[name].contract.lse, "natural")


def test_a_forward_is_compared_only_where_every_visited_key_is_seen(
    collection: dict[str, Declaration],
) -> None:
    declaration = collection["triton-flash-forward"]
    (whole, _) = algebra.problems(declaration, "float16")
    others = (
        replace(whole, mask=Causal()),
        replace(whole, seqlen_kv=383),
        replace(whole, seqlen_kv=0),
    )
    fp8 = collection["triton-fp8-forward"]
    (eight, _) = algebra.problems(fp8, "float8_e4m3fn")
    assert algebra.comparable(fp8, fp8.configs[0], eight)
    with_factors = replace(eight, quantisation=parse_quantisation("tensor"))
    for other in (with_factors, replace(eight, dtype_out="float8_e4m3fn")):
        assert not algebra.comparable(fp8, fp8.configs[0], other)
    for problem in others:
        assert not algebra.comparable(declaration, declaration.configs[0], problem)
    backward = replace(declaration, entries=("forward", "backward"))
    assert algebra.comparable(backward, backward.configs[0], others[0])
    cases = tuple(Case("v", "c", "sanitizer", problem) for problem in (whole, *others))
    rehearsed = Rehearsed(0, Subject(declaration, declaration.configs[0], "float16", cases), {})
    assert _for_tool(FPSAN, rehearsed).subject.cases == cases[:1]
    assert _for_tool(CONSAN, rehearsed) is rehearsed
    turns = Config(block_m=128, block_n=128, num_warps=8, options=(("turns", 1),))
    other = replace(rehearsed, subject=replace(rehearsed.subject, config=turns))
    assert not _for_tool(FPSAN, other).subject.cases
    assert algebra.scales_behind_the_maximum(hopper_forward.TURNSTILE[0])


def test_its_slips_are_tried_under_it_alone() -> None:
    assert {fault.variant for fault in ALGEBRA} == {v.name for v in planted_kernels.VARIANTS}
    for fault in ALGEBRA:
        assert fault.tried_under(ALL) == (FPSAN,)
        assert sum((fault.twin, FPSAN in fault.caught_by, fault.unseen != "")) == 1
    assert not any(FPSAN in fault.tried_under(ALL) for fault in FAULTS if not fault.algebra)


def test_what_an_h100_said_shows_each_slip_and_accuses_no_other_kernel() -> None:
    path = Path(__file__).parent / "data" / "triton-3.8.0" / "fpsan.json"
    said = {row["variant"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    for fault in ALGEBRA:
        row = said.pop(fault.variant)
        records = ()
        if row["text"]:
            records = (Record(tool=FPSAN, kind=algebra.KIND, text=row["text"], words=row["text"]),)
        judgement = Judgement(row["outcome"], (), records, len(records))
        assert fault.holds(FPSAN, judgement)
    assert set(said) == COMPARED - {"triton-fp8-transposed-wide-forward"}  # written since then
    assert {row["outcome"] for row in said.values()} == {"clean"}


# A process: on the CPU, where Triton's interpreter stands for FPSan.

BY_THE_PLAIN_KERNEL = """
    from tests.planted import plain
    plain.forward(False, args, out, lse, workspace)
"""
SLIPPED = BY_THE_PLAIN_KERNEL + "    out[0, 0, 3, 5] += 1.0\n"
FORGETS = BY_THE_PLAIN_KERNEL.replace("out, lse", "out.clone(), lse")


@pytest.mark.for_ci
@pytest.mark.long(12)
def test_a_process_compares_bits_with_the_plain_kernel(
    write: Writer, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def session(body: str) -> Session:
        (declaration,) = roster([write(body)], fork_server).declarations
        config = declaration.configs[0]
        problem = Problem(seqlen_q=20, seqlen_kv=128, head_dim=8, dtype="float32")
        case = Case(declaration.ref, config.name, "sanitizer", problem)
        subject = Subject(declaration, config, "float32", (case,))
        variables = (*environment().variables, ("CUDA_VISIBLE_DEVICES", ""))
        here = replace(PLAIN_CPU, variables=variables)
        return instrumented.sanitize(FPSAN, here, subject, tmp_path / "files")

    assert session(BY_THE_PLAIN_KERNEL).judgement.outcome == "clean"
    warm(monkeypatch)
    found = session(SLIPPED)
    assert found.judgement.outcome == "faulty"
    (case,) = found.subject.cases
    (failure,) = failures(case, found.subject, found, shared=False)
    assert failure.message.startswith("Algebra: under FPSan out is ")
    assert "out[b=0, h=0, q=3, d=5]" in failure.message
    assert "in the plain kernel; 1 of 160 elements differ" in failure.message
    assert failure.replay.endswith("--tool fpsan")
    unwritten = session(FORGETS).judgement
    assert unwritten.outcome == "inconclusive"
    assert "over other poison" in "; ".join(unwritten.reasons)


EIGHT = "float8_e4m3fn"
# O differs where the config has other rows: as of a kernel that forgets one rescaling there.
BY_ROWS = BY_THE_PLAIN_KERNEL + "    out[0, 0, 3, 5] += args.config.block_m\n"
OTHER_LSE = BY_THE_PLAIN_KERNEL + "    lse[0, 0, 3] += 1.0\n"
# What the plain kernel does not have: another O, the same in every config.
OTHER_OUT = BY_THE_PLAIN_KERNEL + "    out += 1.0\n"


def test_another_config_has_other_rows_and_the_same_blocks_of_keys() -> None:
    for rows, warps, other in ((128, 8, (64, 4)), (64, 4, (128, 8)), (16, 1, (32, 2))):
        config = Config(block_m=rows, block_n=64, num_warps=warps, num_stages=2)
        found = algebra.other_rows(config)
        assert (found.block_m, found.num_warps) == other
        assert (found.block_n, found.num_stages) == (64, 2)


@pytest.mark.for_ci
@pytest.mark.long(12)
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (BY_THE_PLAIN_KERNEL, ""),
        (OTHER_OUT, ""),
        (OTHER_LSE, "lse[b=0, h=0, q=3], and"),
        (BY_ROWS, "in config m64n64w4; 1 of 160 elements differ"),
    ],
)
def test_of_an_8_bit_forward_the_lse_is_compared_and_o_of_two_configs(
    body: str,
    says: str,
    write: Writer,
    fork_server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm(monkeypatch)
    path = write(body, before="from verify.variant import Config")
    text = path.read_text(encoding="utf-8").replace('"float32"', f'"{EIGHT}"')
    config = "configs=(Config(block_m=128, block_n=64, num_warps=8),)"
    path.write_text(text.replace("family=", f"{config}, family="), encoding="utf-8")
    (declaration,) = roster([path], fork_server).declarations
    problem = Problem(seqlen_q=20, seqlen_kv=128, head_dim=8, dtype=EIGHT)
    case = Case(declaration.ref, declaration.configs[0].name, "sanitizer", problem)
    subject = Subject(declaration, declaration.configs[0], EIGHT, (case,))
    here = replace(PLAIN_CPU, variables=(*environment().variables, ("CUDA_VISIBLE_DEVICES", "")))
    session = instrumented.sanitize(FPSAN, here, subject, tmp_path / "files")
    assert session.judgement.outcome == ("faulty" if says else "clean"), session.judgement.reasons
    assert says in "".join(record.text for record in session.judgement.records)
