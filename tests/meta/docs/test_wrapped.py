"""Lines of documents that are generated."""

from __future__ import annotations

import pytest

from tests.faults.record import DOCUMENT
from tests.harness.wrapped import WIDTH, item, wrapped
from tests.mutants.document import PATH


def test_words_and_code_stay_whole_and_lines_are_short() -> None:
    text = "word " * 30 + "`a - b`, " * 30
    lines = wrapped(text, "    ").splitlines()
    assert " ".join(line.strip() for line in lines) == " ".join(text.split())
    assert max(map(len, lines)) <= WIDTH
    assert all(line.count("`") % 2 == 0 for line in lines)
    assert [line.startswith("    ") for line in lines] == [False, *[True] * (len(lines) - 1)]


@pytest.mark.parametrize("mark", ["-", "+", "*", "#", "##", ">", "|", "=", "12.", "3)"])
def test_no_line_begins_with_what_is_a_block_of_its_own(mark: str) -> None:
    for length in range(WIDTH - 4, WIDTH + 2):
        first, *rest = item("x" * (length - 2) + f" {mark} more").splitlines()
        assert first.startswith("- x")
        assert not any(line.strip().startswith(mark) for line in rest)


@pytest.mark.parametrize("path", [DOCUMENT, PATH], ids=lambda path: path.name)
def test_only_rows_of_tables_are_longer(path: object) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()  # type: ignore[attr-defined]
    assert [line for line in lines if len(line) > WIDTH and not line.startswith("|")] == []
