"""docs/reference/: the committed pages say what the code says."""

from __future__ import annotations

import dataclasses
import json

import click
import pytest

import verify
from docs.site import reference
from verify import cli
from verify.machine import settings

PAGES = reference.pages()


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_current(name: str) -> None:
    committed = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert PAGES[name] == committed, f"write it again with `{reference.COMMAND}`"


def test_no_other_page_is_there() -> None:
    assert {path.name for path in reference.FOLDER.iterdir()} == set(PAGES)


def commands(name: str, command: click.Command) -> list[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        return [
            found
            for own, inner in command.commands.items()
            for found in commands(f"{name} {own}", inner)
        ]
    return [(name, command)]


def test_every_command_and_option_is_there_with_a_meaning() -> None:
    for name, command in commands("verify", cli.app):
        _, _, section = PAGES["commands.md"].partition(f"\n## {name}\n")
        section = section.partition("\n## ")[0]
        assert command.help, name
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, (name, option.opts)
                assert f"| `{', '.join(option.opts)}" in section, (name, option.opts)


def test_every_public_name_variable_and_field_is_there() -> None:
    for name in verify.__all__:
        assert f"\n## verify.{name}\n" in PAGES["python.md"]
    for setting in settings.SETTINGS:
        assert f"\n| `{setting.name}` | {settings.LEGAL[setting.kind]} |" in PAGES["environment.md"]
    schema = json.loads((reference.SCHEMAS / "report.json").read_text(encoding="utf-8"))
    for field in schema["$defs"]["Report"]["properties"]:
        assert f"\n| `{field}` | " in PAGES["files.md"]


def test_a_change_of_the_code_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = settings.SETTINGS
    changed = dataclasses.replace(first, default="61")
    monkeypatch.setattr(settings, "SETTINGS", (changed, *others))
    monkeypatch.setattr(verify.check, "__doc__", "Another.")
    monkeypatch.setattr(cli.app.commands["list"], "help", "Another.")
    stale = {name for name, text in reference.pages().items() if text != PAGES[name]}
    assert stale == {"commands.md", "python.md", "environment.md"}
