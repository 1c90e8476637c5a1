"""Summation orders, the processes that probes run in, their report and `verify probe`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness.fake_campaign import DEVICE, evidence
from tests.harness.probe_jobs import dies, hangs, raises, says
from verify.cell.arena import Arena
from verify.cell.discovery import Roster, Unloadable, roster
from verify.cell.process import PLAIN_CPU, Cell, ForkServer
from verify.cli import app
from verify.cli import probe as command
from verify.document import terminal
from verify.machine import device
from verify.probes import order, page, tree
from verify.probes.agreement import Agreement, Mismatch
from verify.probes.functions import FunctionProbe, Worst
from verify.probes.matrix import MatrixProbe, Quantity
from verify.probes.order import OrderProbe
from verify.probes.report import ProbeNotRun, ProbeReport, as_data, read, write
from verify.probes.tree import InconsistentError, Node, Pair
from verify.probes.worker import Job, do_all
from verify.report import build, dumps
from verify.report import read as read_accuracy
from verify.report import write as write_accuracy

# Trees.


def grown(leaves: Sequence[int], random_: random.Random) -> Node:
    """A random tree: chains, pairs and fused groups."""
    if len(leaves) == 1:
        return Node(tuple(leaves))
    cuts = sorted(
        random_.sample(
            range(1, len(leaves)), random_.choice([1, 1, min(3, len(leaves) - 1), len(leaves) - 1])
        )
    )
    parts = [leaves[a:b] for a, b in zip([0, *cuts], [*cuts, len(leaves)], strict=True)]
    return Node(
        tuple(sorted(leaves)),
        tuple(sorted((grown(part, random_) for part in parts), key=lambda node: node.leaves)),
    )


def meetings(whole: Node) -> dict[Pair, int]:
    result = {}
    for part in whole.children:
        result |= meetings(part)
    for left, right in combinations(whole.children, 2):
        result |= {
            (min(i, j), max(i, j)): len(whole.leaves) for i in left.leaves for j in right.leaves
        }
    return result


def normal(node: Node) -> Node:
    return Node(
        node.leaves,
        tuple(sorted((normal(part) for part in node.children), key=lambda part: part.leaves)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_every_tree_is_revealed(seed: int) -> None:
    random_ = random.Random(seed)
    leaves = list(range(random_.choice([2, 5, 33, 70, 200])))
    if seed % 2:
        random_.shuffle(leaves)
    whole = grown(leaves, random_)
    known, asked = meetings(whole), []

    def meeting(pairs: Sequence[Pair]) -> list[int]:
        asked.append(len(pairs))
        return [known[min(pair), max(pair)] for pair in pairs]

    assert normal(tree.reveal(range(len(leaves)), meeting)) == normal(whole)
    assert sum(asked) <= len(known)


def test_what_no_tree_explains_is_refused() -> None:
    known = {(0, 1): 2, (0, 2): 2, (0, 3): 4, (1, 2): 4, (1, 3): 4, (2, 3): 4}
    with pytest.raises(InconsistentError):
        tree.reveal(range(4), lambda pairs: [known[pair] for pair in pairs])
    with pytest.raises(InconsistentError, match="never meet"):
        tree.reveal(range(3), lambda pairs: [1] * len(pairs))


def chained(sizes: Sequence[int]) -> Node:
    node, begin = None, 0
    for size in sizes:
        own = tuple(Node((leaf,)) for leaf in range(begin, begin + size))
        begin += size
        node = Node(tuple(range(begin)), own if node is None else (node, *own))
    assert node is not None
    return node


def shifted(node: Node, by: int) -> Node:
    return Node(
        tuple(leaf + by for leaf in node.leaves), tuple(shifted(part, by) for part in node.children)
    )


def test_trees_in_words() -> None:
    assert tree.describe(chained([16] * 8)) == "chain of 8 fused groups of 16"
    assert tree.describe(chained([8])) == "one fused addition of 8"
    assert tree.describe(chained([2, 1, 1])) == "one after the other"
    assert tree.describe(chained([8, 8, 1])) == "chain of 2 fused groups of 8, then 1 single"
    block = chained([16] * 4)
    two = Node(tuple(range(128)), (block, shifted(block, 64)))
    three = Node(tuple(range(192)), (two, shifted(block, 128)))
    assert (
        tree.describe(three)
        == "3 blocks of 64, added one after the other; each: chain of 4 fused groups of 16"
    )
    pairs = Node((0, 1, 2, 3), (chained([2]), shifted(chained([2]), 2)))
    balanced = Node(tuple(range(8)), (pairs, shifted(pairs, 4)))
    assert tree.describe(balanced).startswith(
        "2 blocks of 4, added one after the other; each: 2 blocks of 2"
    )


# Orders of variants.

KERNEL = '''
import torch

def fused(terms):
    """Each term truncated to 25 bits below the largest, then an exact sum: a matrix unit."""
    last = torch.exp2(torch.frexp(terms.abs().amax(0, keepdim=True)).exponent.double() - 26)
    return ((terms / last).trunc().sum(0, keepdim=True) * last).float().double()

def attention(q, k, v, causal=False, softmax_scale=None):
    n = k.shape[2]
    out = torch.empty_like(v[:, :, :1].expand(-1, -1, q.shape[2], -1))
    scores = (q.float() @ k.float().mT) * (softmax_scale or q.shape[-1] ** -0.5)
    p = torch.softmax(scores, -1).double() * n
    x = (p[:, :, :1].mT * v.double()).permute(2, 0, 1, 3)
    total = torch.zeros_like(x[:1])
    {body}
    out.copy_((total[0] / n)[:, :, None].to(v.dtype).expand_as(out))
    return out
'''
ORDERS = {
    "fused groups of 8": (
        "for at in range(0, n, 8):\n        total = fused(torch.cat([total, x[at : at + 8]]))",
        "chain of 8 fused groups of 8",
        ("0-7", "8-15", "16-23", "24-31"),
    ),
    "backwards": (
        "for at in reversed(range(n)):\n        total = (total + x[at : at + 1]).float().double()",
        "one after the other",
        ("62-63", "61", "60", "59"),
    ),
    "promoted blocks": (
        (
            "for at in range(0, n, 32):\n        block = torch.zeros_like(total)\n        for i in"
            " range(at, at + 32, 16):\n            block = fused(torch.cat([block, x[i : i +"
            " 16]]))\n        total = (total + block).float().double()"
        ),
        "2 blocks of 32, added one after the other; each: chain of 2 fused groups of 16",
        ("0-15", "16-31"),
    ),
}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], OrderProbe]]:
    """Probes a kernel of that name."""
    folder = tmp_path_factory.mktemp("orders")
    files = {name: folder / f"{name.replace(' ', '_')}.py" for name in BODIES}
    for name, file in files.items():
        file.write_text(KERNEL.replace("{body}", BODIES[name]), encoding="utf-8")
    declarations = dict(zip(files, roster(list(files.values())).declarations, strict=True))
    fork_server, arena = ForkServer(PLAIN_CPU), Arena()
    cells = {name: Cell(fork_server) for name in files}

    def asked(name: str, keys: int) -> OrderProbe:
        declaration = declarations[name]
        return order.probe(declaration, declaration.configs[0], cells[name], arena, "cpu", keys)

    yield asked
    for cell in cells.values():
        cell.close()
    fork_server.close()
    arena.close()


BODIES = {name: body for name, (body, _, _) in ORDERS.items()} | {
    "unequal weights": "total = (x * torch.linspace(0, 2, n)[:, None, None, None]).sum(0, True)"
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_a_variant_is_revealed(
    name: str, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        monkeypatch.setattr(order, "_DTYPES", (dtype,))
        result = ask(name, 64)
        assert (result.reason, result.dtype, result.keys) == ("", dtype, 64)
        assert (result.order, result.groups) == ORDERS[name][1:]


def test_a_kernel_that_weighs_keys_differently_has_no_order(ask: Any) -> None:
    result = ask("unequal weights", 16)
    assert result.order == ""
    assert result.reason.startswith("InconsistentError")


# Processes.


def test_no_job_takes_another_with_it() -> None:
    jobs = [
        Job(says, ("one",)),
        Job(says, ("two", "an error")),
        Job(raises),
        Job(dies),
        Job(hangs),
        Job(says, ("last",)),
    ]
    one, two, *failed, last = do_all(jobs, 1, patience=5.0)
    assert one.result is not None
    assert two.result is not None
    assert last.result is not None
    assert (one.result.word, two.result.word, last.result.word) == ("one", "two", "last")
    assert one.result.process == two.result.process != last.result.process
    assert [answer.failure for answer in failed] == [
        "ValueError: planted",
        "its process ended with status 7",
        "no answer within 5 s; killed",
    ]


# The report.

GOOD = Quantity("fraction bits F", "25", "25")
AGREED = Agreement(1 << 20, 0, 0, {})
MISMATCH = Mismatch("near 1", ("3c00",) * 16, ("0001",) * 16, "00000000", "3f800000", "3f800001")
MATRIX = MatrixProbe(
    "mma.sync m16n8k16 f16 into f32", "the table", structure=(GOOD,), specials=(), agreement=AGREED
)
WORST = Worst(1.5, "3f800001")
FUNCTION = FunctionProbe(
    "ex2.approx.f32", "PTX ISA", 1 << 32, True, WORST, 1.5, WORST, WORST, Worst(0.6, "3f800001")
)
REPORT = ProbeReport(
    DEVICE,
    "sm_90a",
    (MATRIX,),
    (FUNCTION,),
    (
        OrderProbe(
            "torch-flash",
            "default",
            "bfloat16",
            256,
            "chain of 16 fused groups of 16",
            ("0-15",),
            2,
        ),
    ),
    (ProbeNotRun("wgmma m64n8k16 f16 into f32", "only sm_90a has wgmma"),),
)
WRONG: dict[str, dict[str, Any]] = {
    "structure": {"matrix": (replace(MATRIX, structure=(GOOD, replace(GOOD, measured="24"))),)},
    "special": {
        "matrix": (replace(MATRIX, specials=(Quantity("inf 0", "7fffffff", "7fc00000"),)),)
    },
    "bits": {
        "matrix": (
            replace(
                MATRIX,
                agreement=replace(AGREED, mismatches=3, by_kind={"near 1": 3}, first=MISMATCH),
            ),
        )
    },
    "bound": {"functions": (replace(FUNCTION, ratio=Worst(1.25, "3f800001")),)},
    "NaN": {"functions": (replace(FUNCTION, wrong="a NaN"),)},
}


def test_a_report_survives_its_json(tmp_path: Path) -> None:
    for report in (REPORT, *(replace(REPORT, **changes) for changes in WRONG.values())):
        paths = write(report, tmp_path, page.markdown(report))
        assert read(paths[0]) == report
        data = json.loads(paths[0].read_text(encoding="utf-8"))
        assert data["agrees"] is report.agrees
        assert data["matrix"][0]["agrees"] is report.matrix[0].agrees
    assert as_data(REPORT)["matrix"][0]["structure"][0]["agrees"] is True


@pytest.mark.parametrize("name", WRONG)
def test_every_disagreement_is_red_and_marked(name: str) -> None:
    report = replace(REPORT, **WRONG[name])
    assert REPORT.agrees
    assert not report.agrees
    assert not list(page.details(REPORT))
    assert len(list(page.details(report))) == 1
    assert "❌" not in page.markdown(REPORT)
    assert "❌ **DISAGREES**" in page.markdown(report)
    styles = [
        str(cell.spans)
        for title, table in page.titled(report)
        for column in terminal.render(table, title).columns
        for cell in column.cells
    ]
    assert "bold red" in "".join(styles)
    if name == "bits":
        assert "device 3f800000, model 3f800001" in page.markdown(report)


def test_what_failed_is_no_agreement() -> None:
    report = replace(REPORT, matrix=(MatrixProbe("mma.sync", error="CompileError: no"),))
    assert report.agrees
    assert report.failed == ("mma.sync",)
    assert "CompileError: no" in page.markdown(report)


def test_without_a_gpu_every_probe_is_listed_as_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "environment", lambda: PLAIN_CPU)
    monkeypatch.setattr(
        command, "roster", lambda files: Roster((), (Unloadable("mine.py", "mine.py", "no"),))
    )
    result = CliRunner().invoke(
        app, ["probe", "--out", str(tmp_path), "--json"], standalone_mode=False
    )
    assert (result.exception, result.return_value) == (None, 0)
    (path,) = tmp_path.glob("*/probes.json")
    report = read(path)
    named = [entry.name for entry in report.not_run if entry.reason == "no GPU"]
    offered = (*command.CONFORMING, *command.INSTRUCTIONS, *command.FUNCTIONS)
    assert named == [one.name for one in offered]
    assert len(set(named)) == len(named)
    assert report.not_run[-1] == ProbeNotRun("summation order of mine.py", "does not load")
    assert json.loads(result.stdout)["agrees"] is True
    assert "Not run, " in path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("report", "status"),
    [(REPORT, 0), (replace(REPORT, **WRONG["bits"]), 1)],
    ids=["agrees", "disagrees"],
)
def test_exit_codes(
    report: ProbeReport,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # so that no committed report is written again with these probes
    monkeypatch.setattr(command, "measure", lambda request, console: report)
    assert CliRunner().invoke(app, ["probe"], standalone_mode=False).return_value == status
    failed = replace(report, functions=(replace(FUNCTION, error="no"),))
    monkeypatch.setattr(command, "measure", lambda request, console: failed)
    assert CliRunner().invoke(app, ["probe"], standalone_mode=False).return_value == (status or 3)


def probed(report: ProbeReport, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """The output of `verify probe` if it measures that report."""

    def measure(request: command.Request, console: object) -> ProbeReport:
        write(report, request.folder, page.markdown(report))
        return report

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(device, "slug", lambda: "a-device")
    return CliRunner().invoke(app, ["probe", *words], standalone_mode=False).output


@pytest.mark.parametrize(
    ("words", "folders"),
    [
        ((), {".verify/report"}),
        (("--out", "there"), {"there"}),
        (("--publish",), {".verify/report", "reports"}),
        (("--publish", "--out", "there"), {".verify/report", "there"}),
    ],
)
def test_probes_go_among_tracked_files_if_that_is_asked_for(
    words: tuple[str, ...], folders: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = probed(REPORT, monkeypatch, *words)
    pages = {path.parent for path in tmp_path.glob("**/probes.md")}
    assert pages == {path.parent for path in tmp_path.glob("**/probes.json")}
    assert pages == {tmp_path / folder / "a-device" for folder in folders}
    assert all(f"{folder}/a-device/probes.md" in said for folder in folders)


def test_a_published_report_shows_the_probes_that_are_published(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    accuracy = build(evidence(cases=2))
    folder = tmp_path / "reports" / "a-device"
    write_accuracy(accuracy, folder)
    wrong = replace(REPORT, **WRONG["bits"], device=accuracy["device"])
    probed(wrong, monkeypatch)
    assert dumps(read_accuracy(folder)) == dumps(accuracy)
    probed(wrong, monkeypatch, "--publish")
    (beside,) = read_accuracy(folder)["beside"]
    assert (beside["name"], beside["status"]) == ("probes", "red")


def test_what_would_be_less_than_what_lies_there_is_not_published(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = replace(REPORT, functions=(replace(FUNCTION, error="no"),))
    said = probed(failed, monkeypatch, "--publish")
    assert f"not published, since probes failed: {FUNCTION.name}" in said
    (tmp_path / "mine.py").touch()
    done = CliRunner().invoke(app, ["probe", "--publish", "mine.py"], standalone_mode=False)
    assert "name no KERNELS" in str(done.exception)
    assert not Path("reports").exists()
