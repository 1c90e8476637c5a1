"""The numbers of docs/how-a-verdict-is-reached.md and of the example in docs/tolerance.md, computed
again.

What `tests.bound_terms` prints is compared word by word, each number within its last printed place.
An equation in inline code must hold.  It may use short numbers, numbers that a command has printed
on that page, and results of the equations before it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests import bound_terms
from tests.harness.declared import with_fields
from verify.campaign.edge_cases import edges
from verify.campaign.targets import Target
from verify.cell.loading import load
from verify.cell.process import ROOT
from verify.evidence import Finding
from verify.judging.comparison import compare, excess
from verify.judging.truth import Truth, compute_truth
from verify.problem import Problem
from verify.problem.case import Case, replay_command
from verify.problem.coverage import bins_reachable, coverage_bins
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.forward import BEST, resolve
from verify.variant import AttentionArgs, Config, Declaration

PAGE = ROOT / "docs" / "how-a-verdict-is-reached.md"
TOLERANCE = ROOT / "docs" / "tolerance.md"
PAGES = pytest.mark.parametrize("page", [PAGE, TOLERANCE], ids=["page", "tolerance"])
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
EQUATION = re.compile(r"`([-\d.+*/() ]+) = (-?[\d.]+)`")
TERM = re.compile(r"\d+(?:\.\d+)?")
SHORT = re.compile(r"\d+(\.\d)?")


def last_place(number: str) -> float:
    """One unit in the last printed place: 1e-4 of "0.2692", 1e-8 of "1.7745e-04"."""
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def near(one: str, other: str) -> bool:
    """Whether two numbers are within two units of the last place of the coarser one."""
    return abs(float(one) - float(other)) <= 2.001 * max(last_place(one), last_place(other))


def same(printed: str, again: str) -> bool:
    """Whether the words are the same, and the numbers near."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", again).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(again), strict=True)
    return all(near(one, other) for one, other in pairs)


def test_numbers_are_compared_to_their_last_place() -> None:
    assert same("r  1.50e-03 of 12", "r 1.52e-03 of 12")
    assert not same("r 1.50e-03 of 12", "r 1.53e-03 of 12")
    assert not same("r 1.50e-03 of 12", "r 1.50e-03 or 12")


def text_of(page: Path) -> str:
    """The text of the page, or the example of docs/tolerance.md."""
    text = page.read_text(encoding="utf-8")
    if page == PAGE:
        return text
    return text.partition("\n## One element, by hand\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def shown(page: Path, program: str) -> Iterator[tuple[list[str], str]]:
    """(arguments, output) for each command of that program on the page."""
    command = rf"^```sh\npython3 -m {re.escape(program)} ([^\n]*)\n```\n\n"
    both = re.compile(rf"{command}```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for words, output in both.findall(text_of(page)):
        yield shlex.split(words), output


def measures(output: str) -> dict[str, float]:
    """The measures that a replay prints after the oracles' names."""
    pairs = re.findall(r"\b([a-z]\w*) (-?[\d.]+(?:e[+-]\d+)?)(?=,|\n|$)", " ".join(output.split()))
    return {name: float(number) for name, number in pairs}


@cache
def declaration_of(variant: str) -> Declaration:
    return bound_terms.declaration_of(variant)


def config_of(declaration: Declaration, name: str) -> Config:
    return next(config for config in declaration.configs if config.name == name)


def truth_of(case: Case) -> Truth:
    """Reference, bounds and best bounds, as in a trial on a CPU."""
    declaration, problem = declaration_of(case.variant), case.problem
    config = config_of(declaration, case.config)
    inputs = dequantised(problem, tensors(problem))
    both = [resolve(numerics, config, problem, "cpu") for numerics in (declaration.numerics, BEST)]
    return compute_truth(problem, inputs, both)


def bound_ratio(truth: Truth) -> float:
    """The median of bound / best bound."""
    assert truth.best_out_bound is not None
    return float((truth.out_bound / truth.best_out_bound).median())


def the_case_that_passes() -> tuple[Case, str]:
    """The page's passing case, and the output of its replay."""
    (shell,) = shown(PAGE, "verify replay")
    ((case,), output) = shell
    return Case.parse(case), output


@pytest.fixture
def my_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's kernel in the current directory, where its case ids look for it."""
    (text,) = blocks(text_of(PAGE), "python")
    path = tmp_path / "my_attention.py"
    path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return path


@PAGES
@pytest.mark.usefixtures("my_attention")
def test_the_terms_are_what_the_command_prints(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.bound_terms.declaration_of", cache(bound_terms.declaration_of))
    commands = list(shown(page, "tests.bound_terms"))
    assert len(commands) == (2 if page == PAGE else 1)
    for words, output in commands:
        assert bound_terms.main(words) == 0, capsys.readouterr().err
        again = capsys.readouterr().out
        assert same(output, again), again


def test_a_bound_that_it_cannot_take_apart_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((words, _),) = shown(TOLERANCE, "tests.bound_terms")
    declared = declaration_of(Case.parse(words[0]).variant)
    narrow = replace(declared, numerics=with_fields(declared.numerics, accumulator="float16"))
    monkeypatch.setattr("tests.bound_terms.declaration_of", lambda variant: narrow)
    for more, said in (([], "does not take apart"), (["--index", "16"], "not from 0 to 15")):
        assert bound_terms.main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert bound_terms.main(["no:case"]) == 2


@PAGES
def test_the_equations_hold(page: Path) -> None:
    text = text_of(page)
    printed = NUMBER.findall("\n".join(blocks(text, "text")))
    known = {number.lstrip("-") for number in printed}
    equations = EQUATION.findall(text)
    assert len(equations) >= 4
    for expression, result in equations:
        unknown = {number for number in TERM.findall(expression) if not SHORT.fullmatch(number)}
        assert unknown <= known, f"{expression}: no command has printed {unknown - known}"
        error = abs(value(expression) - float(result))
        assert error <= doubt(expression) + last_place(result), f"{expression} = {result}"
        known.add(result.lstrip("-"))


def value(expression: str) -> float:
    """The value of an expression of digits, brackets and the four operations (see `EQUATION`)."""
    return float(eval(expression, {"__builtins__": {}}))


def doubt(expression: str) -> float:
    """How much the last places of the expression's numbers can change its value."""
    moved = 0.0
    for match in TERM.finditer(expression):
        if "." in match[0]:
            more = repr(float(match[0]) + last_place(match[0]))
            changed = expression[: match.start()] + more + expression[match.end() :]
            moved += abs(value(changed) - value(expression))
    return moved


def test_the_case_that_passes_is_an_edge_case_with_those_bins() -> None:
    text, (case, _) = text_of(PAGE), the_case_that_passes()
    assert blocks(text, "text")[0].strip() == case.id
    declaration = declaration_of(case.variant)
    config = config_of(declaration, case.config)
    assert case.problem in edges(Target(declaration, config, case.problem.dtype, case.group))
    bins = coverage_bins(case.problem, config)
    bin_list = re.search(r"fills seven coverage bins .*?:(.*?)\n\n", text, flags=re.DOTALL)
    assert bin_list is not None
    assert set(re.findall(r"`([^`]+)`", bin_list[1])) == bins
    reachable = len(bins_reachable(declaration.support, config))
    words = " ".join(text.split())
    assert f"One case fills {len(bins)} of {reachable} bins" in words
    assert f"knows nothing of the other {reachable - len(bins)}." in words


def test_the_replay_is_of_that_truth_and_bound() -> None:
    """No kernel runs here: its output is taken from the page."""
    case, output = the_case_that_passes()
    got, truth = measures(output), truth_of(case)
    for name, want, bound in (
        ("out", truth.out, truth.out_bound),
        ("lse", truth.lse, truth.lse_bound),
    ):
        index = int(got[f"worst_index_{name}"])
        assert got[f"worst_reference_{name}"] == pytest.approx(float(want.flatten()[index]), 1e-3)
        assert got[f"worst_bound_{name}"] == pytest.approx(float(bound.flatten()[index]), 1e-3)
        assert got[f"max_error_{name}"] <= got[f"error_bound_{name}"]
    error = abs(-1526 / 4096 - float(truth.out.flatten()[95]))
    assert error == pytest.approx(got["max_error_out"], 1e-3)
    assert error / float(truth.out_bound.flatten()[95]) == pytest.approx(got["r_out"], 1e-3)
    assert bound_ratio(truth) == pytest.approx(got["bound_ratio"], 1e-3)
    line = next(line for line in text_of(PAGE).splitlines() if line.startswith("| **triton"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    named = [got[name] for name in ("r_out", "r_lse", "lse_ulp", "bound_ratio")]
    assert [float(cell) for cell in cells[4:8]] == pytest.approx(named, 2e-3)


def finding_of(file: Path, problem: Problem) -> tuple[float, Finding | None]:
    """The worst r of O, and the bound oracle's finding, for the output of that file's kernel."""
    (variant,) = load(file, str(ROOT)).variants
    given = tensors(problem)
    out = torch.empty(problem.shape_out, dtype=problem.format_out.torch)
    options = problem.mask, problem.scale, problem.score_mod, variant.configs[0]
    args = AttentionArgs(given.q, given.k, given.v, *options)
    variant.forward(args, out, None, {})
    truth = truth_of(Case("my_attention.py@my_attention", "default", "accuracy", problem))
    compared = compare(out, truth.out, truth.out_bound, problem.format_out)
    finding = excess("bound", "out", out, truth.out, truth.out_bound, compared)
    return compared.worst, finding


def test_the_case_that_fails_fails_as_shown(my_attention: Path) -> None:
    text = text_of(PAGE)
    (finding_text,) = (block for block in blocks(text, "text") if block.startswith("bound: "))
    lines = dict(line.strip().split(None, 1) for line in finding_text.splitlines()[1:])
    problem = Problem.parse(lines["problem"])
    _, finding = finding_of(my_attention, problem)
    assert finding is not None
    assert same(finding_text.splitlines()[0], f"bound: {finding.message}")
    assert same(f"{lines['got']} {lines['bound']}", f"{finding.got} {finding.bound}")
    assert lines["where"] == finding.where
    assert lines["how"] == f"many {finding.count} of {finding.total}"
    case = Case(lines["variant"], lines["config"], "accuracy", problem)
    assert lines["replay"] == replay_command(case.id)
    wide = f"The bound is {bound_ratio(truth_of(case)):.0f} times as wide as that of the best"
    assert wide in " ".join(text.split())


def test_the_search_goes_as_shown(my_attention: Path) -> None:
    rows = re.findall(r"^\| `(.*?)` \| ([\d.]+) \| (pass|fail) \|$", text_of(PAGE), re.MULTILINE)
    assert len(rows) == 11
    for name, r, verdict in rows:
        worst, finding = finding_of(my_attention, Problem.parse(name))
        assert (finding is not None) == (verdict == "fail"), name
        assert abs(worst - float(r)) <= last_place(r), name
