"""bench.json: its parser, the fastest rows, and the comparison of two records."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.harness.fake_bench import SHAPE, failed, record, row
from tests.harness.fake_campaign import DEVICE
from verify import cli
from verify.document import Table
from verify.timing import page
from verify.timing.compare import compare
from verify.timing.record import (
    Benchmark,
    RecordError,
    Trial,
    best_config,
    condensed,
    fastest,
    parse,
    read,
    workload_of,
    write,
)

WORKLOAD = workload_of(SHAPE)


def written(record: Benchmark, folder: Path) -> Path:
    return write(record, folder, page.markdown(record))[0]


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = record(row(), failed("triton-fwd"), row("ptx", share=None, first=[float("nan")]))
    path = written(made, tmp_path)
    again = read(path)
    assert str(again) == str(made)  # NaN equals nothing, not even itself
    assert read(tmp_path)["rows"][0] == made["rows"][0]
    for name in ("build", "reason", "differs"):
        assert f'"{name}":""' not in path.read_text()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "Expecting"),
        ("[]", "bench"),
        ('{"schema": 2}', "bench.schema"),
    ],
)
def test_what_is_no_record_is_named(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(RecordError, match=named):
        read(tmp_path)
    with pytest.raises(ValueError, match=named):
        parse(text)


def test_the_fastest_config_of_each_variant() -> None:
    """A failed row and one whose values differ do not count, however fast."""
    rows = [
        row("a", 3e-3, config="slow"),
        row("a", 2e-3, config="fast"),
        row("a", 1e-3, config="wrong", differs="first row, column 0: 1, others 0"),
        failed("a"),
        row("a", 4e-3, config="bf16", dtype="bfloat16"),
    ]
    assert [(one["dtype"], one["config"]) for one in fastest(rows)] == [
        ("float16", "fast"),
        ("bfloat16", "bf16"),
    ]
    made = record(*rows)
    assert best_config(made, "a", "float16", WORKLOAD) == "fast"
    assert best_config(made, "b", "float16", WORKLOAD) is None
    assert best_config(None, "a", "float16", WORKLOAD) is None
    assert best_config(made, "a", "bfloat16", WORKLOAD) == "bf16"


def test_a_trial_stands_for_all_lengths_of_its_kind() -> None:
    """Rows of several configs say more than it; a row of one alone says less."""
    trial: Trial = {
        "variant": "a",
        "source_hash": "0123456789abcdef",
        "dtype": "float16",
        "workload": {**SHAPE, "seqlen": 4096},
        "seconds": {"slow": 2e-3, "fast": 1e-3},
    }
    other: Trial = {**trial, "workload": {**SHAPE, "mask": "causal"}, "seconds": {"slow": 1e-3}}
    made = record(row("a", 1e-3, config="slow"), trials=[other, trial])
    assert best_config(made, "a", "float16", WORKLOAD) == "fast"
    compared = {**made, "rows": [*made["rows"], row("a", 2e-3, config="fast")]}
    assert best_config(compared, "a", "float16", WORKLOAD) == "slow"  # type: ignore[arg-type]
    assert best_config({**made, "trials": []}, "a", "float16", WORKLOAD) == "slow"
    assert best_config(made, "a", "bfloat16", WORKLOAD) is None


def test_a_trial_of_as_many_heads_comes_first() -> None:
    """One persistent config is fast with 8 heads, and another one with 128."""
    few: Trial = {
        "variant": "a",
        "source_hash": "0123456789abcdef",
        "dtype": "float16",
        "workload": {**SHAPE, "batch": 1, "heads": 8},
        "seconds": {"persistent": 1e-3, "plain": 2e-3},
    }
    many: Trial = {
        **few,
        "workload": {**SHAPE, "batch": 4, "heads": 32},
        "seconds": {"persistent": 2e-2, "plain": 1e-2},
    }
    for trials in ([few, many], [many, few]):
        made = record(trials=trials)
        of = partial(best_config, made, "a", "float16")
        assert of(replace(WORKLOAD, batch=2, heads=64)) == "plain"
        assert of(replace(WORKLOAD, batch=2, heads=4)) == "persistent"
        assert of(replace(WORKLOAD, batch=1, heads=16)) == "persistent"  # the nearer one


def test_tables_by_length() -> None:
    """One for each batch, heads, head dim, mask and direction; the fastest at the longest first."""
    made = record(
        row("a", 1e-3),
        row("a", 5e-4, workload={**SHAPE, "seqlen": 4096}),
        row("b", 5e-4, source_hash="of old"),
        row("b", 7e-4, config="slower"),
        row("c", workload={**SHAPE, "mask": "causal"}),
    )
    full, causal = [one for one in page.by_length(made, {"b": "new"}) if isinstance(one, Table)]
    assert full.columns == ("variant", "dtype", "N = 4096", "N = 8192")
    shown = [[getattr(cell, "text", getattr(cell, "value", cell)) for cell in r] for r in full.rows]
    assert shown == [
        ["b: another source than this report's", "float16", "–", "275"],
        ["a", "float16", "275", "137"],
    ]
    assert len(causal.rows) == 1


class TestComparison:
    def test_a_planted_slow_row_is_found(self) -> None:
        old = record(row("a"), row("b"), row("c"))
        new = record(row("a", 1.2e-3), row("b", 1.015e-3), row("c", 0.8e-3))
        found = compare(old, new)
        (slow,) = found.slower
        assert slow.place == ("a", "default", "float16", WORKLOAD)
        assert slow.ratio == pytest.approx(1.2)
        assert (slow.low, slow.high) == (
            pytest.approx(1.2 * 0.99 / 1.01),
            pytest.approx(1.2 * 1.01 / 0.99),
        )
        assert [one.place[0] for one in found.changes if one.faster] == ["c"]
        assert found.regressed

    def test_a_ratio_within_the_noise_is_none(self) -> None:
        """40 % more, but the calls of the new run vary by more than that."""
        noisy = {"median": 1.4e-3, "minimum": 0.9e-3, "p10": 0.95e-3, "p90": 2e-3}
        found = compare(record(row("a")), record(row("a", seconds=noisy)))
        assert not found.regressed

    def test_clocks_wander(self) -> None:
        """4 % more in every call, so that the bands are apart."""
        found = compare(record(row("a")), record(row("a", 1.04e-3)))
        assert found.changes[0].low > 1
        assert not found.regressed

    def test_what_is_timed_no_more(self) -> None:
        old = record(row("a"), row("b"), row("c"))
        found = compare(old, record(failed("a"), row("d")))
        assert [(place[0], reason) for place, reason in found.gone] == [
            ("a", "failed: crash: killed by SIGSEGV")
        ]
        assert (found.unasked, [place[0] for place in found.added]) == (2, ["d"])
        assert found.regressed

    def test_rows_that_were_not_reached_are_counted_and_known_to_a_comparison(self) -> None:
        late = [failed(name, "interrupted") | {"outcome": "left"} for name in "bbc"]
        new = condensed(record(row("a"), failed("d"), *late))
        assert [one["variant"] for one in new["rows"]] == ["a", "d"]
        assert [(one["variant"], one["reason"]) for one in new["left"][-2:]] == [
            ("b", "2 rows of 1 config: interrupted"),
            ("c", "1 row of 1 config: interrupted"),
        ]
        found = compare(record(row("a"), row("b"), row("e")), new)
        assert [(place[0], reason) for place, reason in found.gone] == [
            ("b", "left: 2 rows of 1 config: interrupted")
        ]
        assert (found.unasked, found.regressed) == (1, False)

    def test_another_device_is_no_regression(self) -> None:
        other = record(row("a", 2e-3), device=DEVICE | {"slug": "elsewhere"})
        assert not compare(record(row("a")), other).regressed

    def test_the_command(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        old = written(record(row("a")), tmp_path / "old")
        new = written(record(row("a", 1.5e-3, source_hash="1")), tmp_path / "new")
        monkeypatch.setattr(sys, "argv", ["verify", "compare", str(old), str(new)])
        assert cli.main() == 1
        out = capsys.readouterr().out
        for said in ("1 rows in both: slower", "Slower", WORKLOAD.name, "1.47 to 1.53", "changed"):
            assert said in out
        folders = ["verify", "compare", str(tmp_path / "new"), str(tmp_path / "old")]
        monkeypatch.setattr(sys, "argv", folders)
        assert cli.main() == 0
        assert "no regression" in capsys.readouterr().out
        (tmp_path / "old" / "bench.json").write_text("{")
        assert cli.main() == 2
