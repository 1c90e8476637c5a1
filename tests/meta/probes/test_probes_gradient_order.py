"""Orders of backwards: what is declared is confirmed where it is so, and contradicted where not."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from tests.meta.probes.test_probes_order import chained, grown, shifted
from tests.sample_kernels import ordered_backward
from verify.cell.discovery import roster
from verify.cell.process import PLAIN_CPU
from verify.cli import app
from verify.cli import probe as command
from verify.probes import gradient_order, page
from verify.probes.declared_order import contradicts
from verify.probes.gradient_order import Given
from verify.probes.report import GradientOrderProbe, ProbeReport, read
from verify.probes.tree import Node
from verify.problem import Problem
from verify.tolerance.backward import resolve
from verify.variant import AttentionArgs, Gradients, Saved, Variant

pytestmark = [pytest.mark.for_ci, pytest.mark.usefixtures("one_thread")]
KERNELS = Path(__file__).parents[2] / "sample_kernels" / "ordered_backward.py"
HEAD_DIM = {"dP, in dQ", "dP, in dK", "S, in dV", "S, in dQ"}
ALL = {"dQ", "dK", "dV"} | HEAD_DIM
# variant -> the sums that contradict what it declares
WRONG = {
    "ordered": set(),
    "within-steps": set(),
    "whole-first": set(),
    "whole-first-undeclared": {"dQ", "dK", "dV"},
    "first-step-last": {"dQ"},
    "backwards": {"dK", "dV"},
    "head-dim-backwards": HEAD_DIM,
    "parts": {"dK", "dV"},
    "behind-before-whole": {"dK", "dV"},
}

# Trees.


def steps(*sizes: int) -> list[list[int]]:
    found, at = [], 0
    for size in sizes:
        found.append(list(range(at, at + size)))
        at += size
    return found


def joined(*parts: Node) -> Node:
    return Node(tuple(sorted(leaf for part in parts for leaf in part.leaves)), parts)


def leaf(number: int) -> Node:
    return Node((number,))


def test_a_running_sum_is_of_that_order_whatever_a_step_does_inside() -> None:
    assert not contradicts(chained([8] * 4), steps(8, 8, 8, 8), "ascending")
    assert not contradicts(chained([2] + [1] * 30), steps(16, 16), "ascending")
    assert not contradicts(chained([16, 16]), steps(16, 16), "ascending")
    step = joined(leaf(2), leaf(3))
    assert not contradicts(joined(joined(leaf(0), leaf(1)), step), steps(2, 2), "ascending")
    first = joined(joined(leaf(1), leaf(0)), leaf(3))
    assert not contradicts(joined(first, leaf(2)), steps(2, 2), "ascending")


def test_what_is_no_running_sum_or_another_order_is_contradicted() -> None:
    # two steps in one instruction
    assert "no sum of their own" in contradicts(chained([32]), steps(16, 16), "ascending")
    halves = joined(chained([2, 1, 1]), shifted(chained([2, 1, 1]), 4))
    assert "without all" in contradicts(halves, steps(2, 2, 2, 2), "ascending")
    backwards = joined(joined(joined(leaf(3), leaf(2)), leaf(1)), leaf(0))
    assert "without all" in contradicts(backwards, steps(1, 1, 1, 1), "ascending")
    late = joined(joined(joined(leaf(0), leaf(2)), leaf(1)), leaf(3))
    assert contradicts(late, steps(1, 1, 1, 1), "ascending")
    # that could be 2 first, which is seen whole, then 0 and 1, and 3 behind
    assert contradicts(late, steps(1, 1, 1, 1), "whole_first") == ""


def test_whole_blocks_may_come_first_where_that_is_declared() -> None:
    def chain(*leaves: int) -> Node:
        node = joined(leaf(leaves[0]), leaf(leaves[1]))
        for each in leaves[2:]:
            node = joined(node, leaf(each))
        return node

    single = steps(1, 1, 1, 1, 1)
    for right in ((0, 1, 2, 3, 4), (2, 3, 0, 1, 4), (3, 4, 0, 1, 2), (1, 2, 3, 0, 4)):
        assert not contradicts(chain(*right), single, "whole_first")
    for wrong in ((2, 3, 4, 1, 0), (4, 2, 3, 0, 1), (0, 1, 3, 2, 4), (1, 0, 4, 3, 2)):
        assert contradicts(chain(*wrong), single, "whole_first")
    assert contradicts(chain(2, 3, 0, 1, 4), single, "ascending")


@pytest.mark.parametrize("seed", range(20))
def test_trees_at_random_are_of_an_order_only_if_every_prefix_is_a_sum(seed: int) -> None:
    made = random.Random(seed)
    node = grown(list(range(6)), made)
    sums = set()

    def walk(each: Node) -> None:
        sums.add(each.leaves)
        for child in each.children:
            walk(child)

    walk(node)
    prefixes = {tuple(range(count)) for count in range(1, 7)}
    assert (not contradicts(node, steps(*[1] * 6), "ascending")) == (prefixes <= sums)


# Backwards.


def launched(variant: Variant, problem: Problem, given: Given) -> dict[str, torch.Tensor]:
    """One launch of a backward, in this process."""
    inputs = given.q, given.k, given.v
    args = AttentionArgs(*inputs, problem.mask, problem.scale, None, variant.configs[0])
    saved = Saved(torch.zeros_like(given.dout), torch.zeros(problem.shape_q[:3]))
    made = Gradients(*(torch.empty_like(x) for x in inputs))
    assert variant.backward is not None
    variant.backward(args, saved, given.dout, made, {})
    return dict(made.by_name())


def asked(name: str) -> list[GradientOrderProbe]:
    """The probes of every sum of a variant, of 64 rows and keys."""
    (variant,) = (one for one in ordered_backward.VARIANTS if one.name == name)
    (declaration,) = (one for one in roster([KERNELS]).declarations if one.name == name)
    config, found = variant.configs[0], []
    for problem in gradient_order.problems_of(declaration, 64):
        arithmetic = resolve(variant.gradients, config, problem, "sm_90")
        reader = gradient_order.Reader(partial(launched, variant), problem, arithmetic)
        found += [
            gradient_order.ask(reader, one, name, config.name)
            for one in gradient_order.sums_of(arithmetic, problem.dtype)
        ]
    return found


@pytest.mark.parametrize("name", WRONG)
def test_an_order_is_confirmed_or_contradicted(name: str) -> None:
    found = asked(name)
    assert [one.error for one in found if one.error] == []
    for dtype in ("bfloat16", "float32"):
        own = {one.name.rpartition(": ")[2]: one for one in found if f", {dtype}: " in one.name}
        assert set(own) == ALL
        assert {sum_ for sum_, one in own.items() if not one.agrees} == WRONG[name]
        assert all(one.order and one.terms and one.launches for one in own.values())


def said_by_the_command(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, ProbeReport, str]:
    """The exit code of `verify probe --only gradients` of one variant, its report and its page.

    The device is said to be one whose orders count; two sums are asked, of 64 rows and keys.
    """
    probe, every = gradient_order.probe, gradient_order.sums_of

    def as_on_hopper(variant: gradient_order.CellVariant) -> list[GradientOrderProbe]:
        return probe(replace(variant, arch="sm_90"), 64)

    chosen = [one for one in roster([KERNELS]).declarations if one.name == name]
    words = ["probe", str(KERNELS), "--only", "gradients", "--out", str(folder)]
    with monkeypatch.context() as patch:
        patch.setattr(command, "roster", lambda files: SimpleNamespace(declarations=chosen))
        patch.setattr(command, "environment", lambda: PLAIN_CPU)
        patch.setattr(gradient_order, "sums_of", lambda *given: every(*given)[:2])
        patch.setattr(gradient_order, "probe", as_on_hopper)
        result = CliRunner().invoke(app, words, standalone_mode=False)
    assert result.exception is None
    (path,) = folder.glob("*/probes.json")
    return result.return_value, read(path), path.with_suffix(".md").read_text(encoding="utf-8")


def test_the_command_contradicts_a_planted_order_and_confirms_a_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, report, text = said_by_the_command("ordered", tmp_path / "right", monkeypatch)
    assert (status, report.agrees, len(report.gradient_orders)) == (0, True, 4)
    assert "Nothing disagrees" in text
    status, report, text = said_by_the_command("first-step-last", tmp_path / "wrong", monkeypatch)
    assert (status, report.agrees) == (1, False)
    wrong = [one for one in report.gradient_orders if not one.agrees]
    assert {one.name.rpartition(": ")[2] for one in wrong} == {"dQ"}
    assert "disagrees with the declared order, ascending" in text
    assert any("without all that comes before" in line for line in page.details(report))


def test_stages_and_kernels_are_not_published() -> None:
    result = CliRunner().invoke(app, ["probe", "--only", "gradients", "--publish"])
    assert result.exit_code == 2
    assert "--only" in result.output
