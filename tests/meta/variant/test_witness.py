"""Worst cases at the end of a kernel file: read from its text, judged first, no part of its
hash."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.fake_campaign import BINS, evidence
from verify.campaign import witnesses as campaign
from verify.campaign.run import CampaignRun
from verify.cell.discovery import roster
from verify.cli import main
from verify.evidence.known_failures import Xfails
from verify.report import build
from verify.report.json_file import dumps
from verify.report.schema import worst_cases
from verify.variant import DeclarationError
from verify.variant.witness import Witness, meaning, with_witnesses, witnesses

SAMPLES = Path(__file__).parents[2] / "sample_kernels"
CASE = "correct_declared.py@correct:default:accuracy:sq=3,skv=5,d=16,dtype=float32"
WORST = Witness(case=CASE, tensor="out", r=0.93, device="NVIDIA H100 80GB HBM3", date="2026-11-22")
KERNEL = textwrap.dedent(
    '''
    """A kernel."""

    SIZE = 3  # how large


    def forward(x):
        """Twice."""
        return 2 * x


    VARIANT = forward
    '''
)


def changed(old: str, new: str) -> bytes:
    assert old in KERNEL
    return KERNEL.replace(old, new).encode()


def test_what_is_written_is_read_again() -> None:
    long = "x:m64n32:accuracy:" + ",".join(f"word{n}=12345" for n in range(40))
    for found in ((), (WORST,), (WORST, WORST), (Witness(**vars(WORST) | {"case": long}),)):
        text = with_witnesses(KERNEL, found)
        assert witnesses(text.encode()) == found
        assert all(len(line) <= 100 for line in text.splitlines())
        assert with_witnesses(with_witnesses(text, (WORST,)), found) == text
        assert meaning(text.encode()) == meaning(KERNEL.encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # how large", ""),
        ("Twice", "Two times"),
        ("A kernel.", "Some kernel."),
        ("2 * x", "2*x"),
    ],
)
def test_words_and_layout_do_not_count(old: str, new: str) -> None:
    assert meaning(changed(old, new)) == meaning(KERNEL.encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SIZE = 3", "SIZE = 3.0"),
        ("SIZE = 3", "SIZE = '3'"),
        ("2 * x", "2 + x"),
        ("2 * x", "x * 2"),
        ("forward(x)", "forward(x, /)"),
        ("VARIANT = forward", 'VARIANT = forward\n\nWITNESS = "a"\nMORE = 1'),  # not the last
        ("VARIANT = forward", "VARIANT = forward if forward else WITNESS\n\nWITNESS = ()"),
        ("return 2 * x", "return forward.__doc__"),
    ],
)
def test_what_a_kernel_does_counts(old: str, new: str) -> None:
    assert meaning(changed(old, new)) != meaning(KERNEL.encode())


def test_docstrings_and_witnesses_count_where_the_file_can_read_them() -> None:
    reading = changed("return 2 * x", "return forward.__doc__")
    assert meaning(reading) != meaning(reading.replace(b"Twice", b"Thrice"))
    asking = changed("VARIANT = forward", "import inspect\nVARIANT = forward")
    assert meaning(asking) != meaning(asking.replace(b"Twice", b"Thrice"))
    used = changed("return 2 * x", "return WITNESS[0]").decode()
    ends = [with_witnesses(used, found).encode() for found in ((WORST,), (WORST, WORST))]
    assert meaning(ends[0]) != meaning(ends[1])
    assert meaning(b"def (") == b"def ("  # what does not parse counts as it is


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("WITNESS = [1]", "is no tuple of dicts"),
        ("WITNESS = (print(),)", "is no literal tuple"),
        ("WITNESS = ({'case': 'x'},)", "witness.tensor: is missing"),
        (f"WITNESS = ({vars(WORST) | {'r': -1}!r},)", "witness.r: -1 is no number"),
        (f"WITNESS = ({vars(WORST) | {'date': 'today'}!r},)", "witness.date: 'today' is no date"),
        (f"WITNESS = ({vars(WORST) | {'tensor': 'o'}!r},)", "witness.tensor: 'o' is none of out"),
        (f"WITNESS = ({vars(WORST) | {'case': 'x'}!r},)", "witness.case: 'x' is no case id"),
        (f"WITNESS = ({vars(WORST) | {'more': 1}!r},)", "witness.more: no such field"),
        (f"WITNESS = (*3 * ({vars(WORST)!r},),)", "is no literal tuple"),
        (f"WITNESS = ({', '.join([repr(vars(WORST))] * 3)})", "has more than 2 cases of correct"),
    ],
)
def test_nonsense_is_one_line(end: str, words: str) -> None:
    with pytest.raises(DeclarationError) as refused:
        witnesses(f"{KERNEL}\n{end}\n".encode())
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_kernel_with_a_witness_has_the_same_hash_and_is_asked_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "correct_declared.py"
    shutil.copy(SAMPLES / "correct_declared.py", file)
    monkeypatch.chdir(tmp_path)
    (before,) = roster([Path(file.name)]).declarations
    assert before.witness == ()
    case = CASE.replace("@correct:", f"@{before.name}:").replace(
        ":default:", f":{before.configs[0].name}:"
    )
    kept = Witness(**vars(WORST) | {"case": case})
    file.write_text(with_witnesses(file.read_text(), (kept,)))
    (after,) = roster([Path(file.name)]).declarations
    assert after.witness == (case,)
    assert after.source_hash == before.source_hash
    run = CampaignRun(tmp_path / "run", "dev", (file,))
    assert next((target.declaration.ref, id_) for target, id_, _ in run.stored_cases([after])) == (
        after.ref,
        case,
    )
    file.write_text(file.read_text().replace("import", "import sys\nimport", 1))
    (other,) = roster([Path(file.name)]).declarations
    assert other.source_hash != before.source_hash


def test_the_command_lists_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = build(evidence(), BINS, Xfails())
    for _, worst in worst_cases(made):
        worst["case"] = worst["case"].replace("/", ":")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "report.json").write_text(dumps(made))
    found = campaign.published(tmp_path)
    assert found
    for ref, each in found.items():
        assert len(each) == 1
        assert each[0].case.startswith(f"{ref}:")
        ratios = [
            one["worst"]["r"]
            for variant in made["variants"]
            if variant["ref"] == ref
            for d in variant["dtypes"]
            for one in d["tensors"].values()
        ]
        assert each[0].r == pytest.approx(max(ratios), rel=1e-2)
    written: list[dict[str, tuple[Witness, ...]]] = []
    monkeypatch.setattr(campaign, "write", lambda found: written.append(found) or [])
    for words in (["witness", str(tmp_path)], ["witness", str(tmp_path), "--write"]):
        monkeypatch.setattr("sys.argv", ["verify", *words])
        assert main() == 0
        said = " ".join(capsys.readouterr().out.split())
        assert all(one.case in said.replace(" ", "") for each in found.values() for one in each)
    assert written == [found]


def test_what_a_report_says_is_a_text_in_the_file_and_no_code() -> None:
    hostile = 'm.py@"+print("run")+"\\:default:accuracy:' + 'a"\\,' * 60
    one = replace(WORST, case=hostile)
    assert witnesses(with_witnesses("x = 1\n", (one,)).encode()) == (one,)
