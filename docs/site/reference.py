"""`python -m docs.site.reference`: write docs/reference/, the pages that the code itself says.

Commands come from click, the public names from `verify.__all__`, variables from
`verify.machine.settings`, and the fields of files from docs/schema/.  A test holds the committed
pages against the code.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).resolve().parents[1] / "reference"
SCHEMAS = FOLDER.parent / "schema"
COMMAND = "python -m docs.site.reference"
_WIDTH = 100


def pages() -> dict[str, str]:
    """The text of each page, by its file name."""
    made = {
        "commands.md": _commands,
        "python.md": _python,
        "environment.md": _environment,
        "files.md": _files,
    }
    return {name: _page(lines) for name, lines in made.items()}


def main() -> int:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


def _page(lines: Callable[[], Iterator[str]]) -> str:
    """Paragraphs with blank lines between them."""
    return "\n\n".join(lines()) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _WIDTH, break_on_hyphens=False)


def _cell(text: str) -> str:
    """A text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _linked(text: str) -> str:
    """The documents that a docstring names, as links."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](../\1)", text)


def _prose(text: str) -> Iterator[str]:
    """The paragraphs of a docstring.  What follows click's mark for "do not wrap" is commands."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            yield f"```sh\n{textwrap.dedent(paragraph[1:]).strip()}\n```"
        else:
            yield _wrapped(_linked(paragraph))


# Commands.


def _commands() -> Iterator[str]:
    from verify.cli import app

    yield "# All commands and options"
    yield f"Made by `{COMMAND}` from the commands themselves."
    yield _wrapped(
        "[command-line.md](../command-line.md) explains them: what a run prints, exit codes, where"
        " reports go, how to interrupt and continue."
    )
    for name, command in app.commands.items():
        yield from _command(f"verify {name}", command)


def _command(name: str, command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        for own, inner in command.commands.items():
            yield from _command(f"{name} {own}", inner)
        return
    context = click.Context(command, info_name=name)
    yield f"## {name}"
    yield f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```"
    yield from _prose(command.help or "")
    rows = [
        _option(option, context)
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
    ]
    if rows:
        yield _table(("Option", "Default", "Meaning"), rows)


def _option(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    """A row of a table of options."""
    names = ", ".join([*option.opts, *option.secondary_opts])
    words = names if option.is_flag else f"{names} {_metavar(option, context)}"
    default = option.default
    if isinstance(default, tuple | list):
        default = ", ".join(map(str, default))
    shown = default if isinstance(default, str | int | float) and not option.is_flag else ""
    help = option.help or ""
    again = " Repeat it for several." if option.multiple and "epeat" not in help else ""
    return f"`{_cell(words)}`", f"`{shown}`" if shown != "" else "", _cell(help + again)


def _metavar(option: click.Option, context: click.Context) -> str:
    """What stands for an option's value."""
    if isinstance(option.type, click.IntRange):
        return f"({option.type.min} or more)"
    return option.make_metavar(context)


# Public names.


def _python() -> Iterator[str]:
    import verify
    from verify import adapters
    from verify.door import plugin
    from verify.door.checking import Report

    yield "# Public names of Python"
    yield f"Made by `{COMMAND}` from `verify.__all__`, its signatures and its docstrings."
    yield _wrapped(
        "[api.md](../api.md) explains them and says what stays. What a kernel file imports,"
        " `verify.variant`, `references.masks` and others, is in"
        " [adding-a-kernel.md](../adding-a-kernel.md)."
    )
    for name in verify.__all__:
        value = getattr(verify, name)
        yield f"## verify.{name}"
        if callable(value):
            yield f"```python\n{_signature(f'verify.{name}', value)}\n```"
            yield from _prose(inspect.getdoc(value) or "")
        else:
            yield f"A {type(value).__name__}: the version, as in `verify --version`."
    yield "## Report"
    yield _wrapped("What `verify.check` returns. Its text, `str(report)`, is one line.")
    yield from _prose(Report.__doc__ or "")
    yield _table(
        ("Field", "Type"), [(f"`{field.name}`", f"`{field.type}`") for field in fields(Report)]
    )
    yield "## Signatures for like="
    rows = [
        (f"`{name}`", _cell(_first(import_module(f"{adapters.__name__}.{name}").__doc__)))
        for name in adapters.NAMES
    ]
    yield _table(("Name", "What it is"), rows)
    yield "## pytest"
    yield _wrapped(f"Fixture `verify_check`: {inspect.getdoc(plugin.verify_check)}")
    yield "Properties that `pytest --kernel FILE` has a test for:"
    yield "\n".join(f"- `{name}`" for name in plugin.PROPERTIES)


def _signature(name: str, function: Callable[..., Any]) -> str:
    """A signature with one argument per line."""
    signature = inspect.signature(function)
    lines = []
    marked = False
    for argument in signature.parameters.values():
        if argument.kind is inspect.Parameter.KEYWORD_ONLY and not marked:
            lines.append("    *,")
            marked = True
        lines.append(f"    {str(argument).replace(chr(39), '')},")
    returned = str(signature.return_annotation).replace("'", "")
    return "\n".join([f"{name}(", *lines, f") -> {returned}"])


def _first(docstring: str | None) -> str:
    """The first paragraph."""
    return inspect.cleandoc(docstring or "").split("\n\n", 1)[0]


# Variables.


def _environment() -> Iterator[str]:
    from verify.machine.settings import INTERNAL, LEGAL, OTHERS, SETTINGS

    yield "# Environment variables"
    yield f"Made by `{COMMAND}` from `verify/machine/settings.py`."
    yield _wrapped(
        "An illegal value is a usage error: one line names the variable and its legal values, and"
        " the exit code is 2."
    )
    rows = [
        (f"`{setting.name}`", LEGAL[setting.kind], setting.default, setting.meaning)
        for setting in SETTINGS
    ]
    rows += [(f"`{name}`", "", "", meaning) for name, meaning in OTHERS.items()]
    yield _table(("Variable", "Legal values", "Default", "Meaning"), rows)
    yield _wrapped(
        "These variables pass facts between the processes of the suite and are not for users: "
        + ", ".join(f"`{name}`" for name in INTERNAL)
        + "."
    )


# Files.


def _files() -> Iterator[str]:
    yield "# Fields of reports and evidence"
    yield f"Made by `{COMMAND}` from the JSON Schemas in `docs/schema/`."
    yield _wrapped(
        "[report-schema.md](../report-schema.md) says what the files mean and what stays when a"
        ' version changes. A *number* can be the string `"nan"`, `"inf"` or `"-inf"`. A field that'
        " is not *needed* is missing in older files, or has the default given."
    )
    for path in sorted(SCHEMAS.glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        yield f"## {schema['title']}"
        yield f"[{path.name}](../schema/{path.name})."
        if "oneOf" in schema:
            yield from _kinds(path.stem, schema["oneOf"])
        if "properties" in schema:
            yield _properties(path.stem, schema)
        for name, definition in schema["$defs"].items():
            if name != "NotFinite":
                yield f"### {path.stem}: {name}"
                yield from _prose(definition.get("description", ""))
                yield _properties(path.stem, definition)


def _kinds(stem: str, options: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of a file, told by their `kind`."""
    yield "Each line is one of these:"
    yield _table(
        ("`kind`", "Fields"),
        [
            (f"`{option['properties']['kind']['const']}`", _type(stem, {"$ref": option["$ref"]}))
            for option in options
        ],
    )


def _properties(stem: str, definition: dict[str, Any]) -> str:
    required = definition.get("required", ())
    rows = []
    for name, schema in definition.get("properties", {}).items():
        default = schema.get("default", "")
        shown = "" if default == "" else f"`{json.dumps(default)}`"
        needed = "yes" if name in required else ""
        rows.append((f"`{name}`", _type(stem, schema), needed, shown))
    return _table(("Field", "Type", "Needed", "Default"), rows)


def _type(stem: str, schema: dict[str, Any]) -> str:
    """A type in words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{stem}-{name.lower()})" if name != "NotFinite" else "number"
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(_type(stem, option) for option in options))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return "anything" if len(kind) > 4 else " or ".join(kind)
    if kind == "array":
        return f"array of {_type(stem, schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(stem, schema['additionalProperties'])}"
    return f"{schema['format']} as string" if "format" in schema else str(kind)


if __name__ == "__main__":
    sys.exit(main())
