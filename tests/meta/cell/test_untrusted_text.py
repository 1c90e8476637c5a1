"""Untrusted text: a kernel's text can be shown on a terminal, stored in a file, and still be
read."""

from __future__ import annotations

import json
import unicodedata

import pytest

from verify.cell.untrusted_text import visible, visible_data


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tile 3 of 4\n\tat k.py", "tile 3 of 4\n\tat k.py"),
        ("größer als 1 – ∞ 試", "größer als 1 – ∞ 試"),
        ("\x1b[2Jgreen\x07", "\\x1b[2Jgreen\\x07"),
        ("\rholds", "\\rholds".replace("\\r", "\\x0d")),
        ("\x9b31m\x7f\x00", "\\x9b31m\\x7f\\x00"),
        ("\ud800 /tmp/\udcff", "\\ud800 /tmp/\\udcff"),
        ("ab\u202edc\u2066\u200f\ufeff", "ab\\u202edc\\u2066\\u200f\\ufeff"),
        ("one\u2028two\U000e0001", "one\\u2028two\\U000e0001"),
    ],
)
def test_what_cannot_be_shown_is_escaped_and_the_rest_is_left(text: str, shown: str) -> None:
    assert visible(text) == shown
    shown.encode()


def test_every_character_is_fit_to_be_shown_and_stored() -> None:
    for start in range(0, 0x110000, 1 << 12):
        shown = visible("".join(map(chr, range(start, start + (1 << 12)))))
        shown.encode("utf-8")
        assert not {
            c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        } - {"\n", "\t"}


def test_data_is_escaped_wherever_it_holds_text_and_a_flood_is_cut() -> None:
    data = {"a\x1b": ["\ud800", 1, 2.5, None, True, {"b": "\u202e"}]}
    shown = visible_data(data)
    assert shown == {"a\\x1b": ["\\ud800", 1, 2.5, None, True, {"b": "\\u202e"}]}
    json.dumps(shown, ensure_ascii=False).encode()
    assert len(visible("x" * 1_000_000)) < 20_000
    assert visible("x" * 1_000_000).endswith("(984000 more characters)")
