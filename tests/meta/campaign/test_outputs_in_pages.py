"""A kernel that writes O into pages: a workspace holds them, and the entry point copies them, as
docs/adding-a-kernel.md says.  The judge finds a page that is not written, or a write past the
last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.cell.process import ROOT
from verify.evidence import Recorder
from verify.problem import Problem

KERNELS = """
import torch

from verify.variant import Contract, Numerics, Output, Products, Softmax, Support, Variant

SUPPORT = Support(dtypes=("float32",), head_dims=(16,), masks=("full",))

{example}

def write(fault):
    def launch(args, made, lse):
        s = args.q @ args.k.mT * args.softmax_scale
        lse.copy_(torch.logsumexp(s, -1))
        rows = torch.softmax(s, -1) @ args.v
        for page in range(len(made) - (fault == "forgets the last page")):
            part = rows[:, :, page * PAGE : (page + 1) * PAGE]
            made[page][:, :, : part.shape[2]] = part
        if fault == "writes past the pages":
            size = made.numel() + 1
            torch.as_strided(made, (size,), (1,), made.storage_offset())[-1] = 0.0
    return launch

def variant(name):
    def run(args, out, lse, workspace):
        global launch
        launch = write(name)
        forward(args, out, lse, workspace)
    return Variant(
        name=name.replace(" ", "-"),
        family="torch",
        forward=run,
        workspace=pages,
        support=SUPPORT,
        numerics=Numerics(
            products=Products(promotion=0),
            softmax=Softmax(exp="vexp", block_n=0),
            output=Output(normalised=True),
        ),
        contract=Contract(),
    )

VARIANTS = [variant(name) for name in ("right", "forgets the last page", "writes past the pages")]
"""


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    made = Judge(Recorder(tmp_path, "main"))
    try:
        yield made
    finally:
        made.close()


def test_outputs_in_pages(judge: Judge, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "adding-a-kernel.md").read_text(encoding="utf-8")
    (example,) = (part for part in text.split("```") if part.startswith("py\nPAGE = 16"))
    path = tmp_path / "in_pages.py"
    path.write_text(KERNELS.replace("{example}", example.removeprefix("py\n")), encoding="utf-8")
    problem = Problem(seqlen_q=35, seqlen_kv=40, head_dim=16, dtype="float32")
    found = roster([path])
    assert not found.failures
    failing = {}
    for declaration in found.declarations:
        target = Target(declaration, declaration.configs[0], "float32", "accuracy")
        verdicts = judge.judge(target, problem)
        failing[declaration.name] = {one.oracle for one in verdicts if one.outcome == "fail"}
    assert failing.pop("right") == set()
    assert "memory" in failing["writes-past-the-pages"]
    assert failing["forgets-the-last-page"] & {"bound", "memory", "execution"}
