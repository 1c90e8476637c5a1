"""The glossary names files that exist, and each word once; links between pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verify.cell.process import ROOT

DOCS = ROOT / "docs"
GLOSSARY = DOCS / "glossary.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def test_the_glossary_names_files_that_exist() -> None:
    text = GLOSSARY.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \| (.*?) \| `(.*?)` \|$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == len(lines) - lines.count("| word | meaning | file |")
    assert [file for _, _, file in rows if not (ROOT / file).is_file()] == []
    words = [word for word, _, _ in rows]
    assert sorted(set(words)) == sorted(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)#\s]+)", text)
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []
