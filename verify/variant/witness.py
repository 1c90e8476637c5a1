"""Witnesses: the worst cases of a kernel, with which its file ends.

    WITNESS = (
        {
            "case": "my-attention:n32:accuracy:sq=1,skv=17,d=32,dtype=float16",
            "tensor": "out",
            "r": 0.93,
            "device": "NVIDIA H100 80GB HBM3",
            "date": "2026-11-22",
        },
    )

They are read from the file's text, never from the loaded module, and are no part of what the source
hash covers (`meaning`): a report that changes them would make itself stale.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from verify.variant.validation import DeclarationError, Declared

NAME = "WITNESS"
MOST = 2  # of one variant: the worst on a GPU and the worst on a CPU
_WIDTH = 85  # characters of a text in one line
_LAYOUT = (
    "ctx",
    "kind",
    "type_comment",
    "type_ignores",
)  # fields of a syntax tree that say nothing


@dataclass(frozen=True, kw_only=True)
class Witness(Declared, path="witness"):
    """The case with the largest error / bound, r, that a device has shown."""

    # its id, which replays it
    case: str
    # out, lse, dq, dk or dv
    tensor: str
    r: float
    # the device's name, as reports have it
    device: str
    # of the report: "2026-11-22"
    date: str


def witnesses(source: bytes) -> tuple[Witness, ...]:
    """Those that a kernel file ends with; raises DeclarationError for what is no such list."""
    statement = _statement(_parsed(source))
    if statement is None:
        return ()
    try:
        listed = ast.literal_eval(statement.value)
    except ValueError:
        raise DeclarationError(f"witness: {NAME} is no literal tuple of dicts") from None
    if not isinstance(listed, tuple) or not all(isinstance(one, dict) for one in listed):
        raise DeclarationError(f"witness: {NAME} is no tuple of dicts")
    found = tuple(_witness(one) for one in listed)
    names = [one.case.rsplit("@", 1)[-1].partition(":")[0] for one in found]
    many = next((name for name in names if names.count(name) > MOST), None)
    if many is not None:
        raise DeclarationError(f"witness: {NAME} has more than {MOST} cases of {many}")
    return found


def _witness(data: dict[Any, Any]) -> Witness:
    missing = [each.name for each in fields(Witness) if each.name not in data]
    if missing:
        raise DeclarationError(f"witness.{missing[0]}: is missing")
    return Witness(**{str(name): value for name, value in data.items()})


def with_witnesses(source: str, found: tuple[Witness, ...]) -> str:
    """The text of a kernel file that ends with those; what it ended with before is replaced."""
    statement = _statement(_parsed(source.encode()))
    lines = source.splitlines()
    kept = "\n".join(lines[: statement.lineno - 1] if statement else lines).rstrip()
    if not found:
        return f"{kept}\n"
    each = "".join(
        "    {\n"
        + "".join(f'        "{name}": {_quoted(value)},\n' for name, value in vars(one).items())
        + "    },\n"
        for one in found
    )
    return f"{kept}\n\n{NAME} = (\n{each})\n"


@lru_cache(maxsize=64)
def meaning(source: bytes) -> bytes:
    """What a kernel's Python file says, for its source hash: all but comments, layout, docstrings
    and witnesses.

    Docstrings count in a file that mentions `__doc__` or `inspect`, and witnesses in one that
    mentions them elsewhere.  What does not parse counts as it is.
    """
    try:
        tree = _parsed(source)
        if _statement(tree) is not None and source.count(NAME.encode()) == 1:
            tree.body.pop()
        if b"__doc__" not in source and b"inspect" not in source:
            _drop_docstrings(tree)
        return repr(_plain(tree)).encode()
    except (DeclarationError, RecursionError, MemoryError):
        return source


def _parsed(source: bytes) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise DeclarationError(f"witness: the file does not parse: {error}") from None


def _statement(tree: ast.Module) -> ast.Assign | None:
    """The assignment of witnesses, if it is the last statement of the file."""
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Assign) and [ast.unparse(target) for target in last.targets] == [NAME]:
        return last
    return None


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]


def _plain(node: Any) -> Any:
    """A syntax tree as tuples, without what is empty: alike in all versions of Python."""
    if isinstance(node, ast.AST):
        parts = ((name, getattr(node, name, None)) for name in node._fields if name not in _LAYOUT)
        return (
            type(node).__name__,
            *((name, _plain(part)) for name, part in parts if part not in (None, [])),
        )
    if isinstance(node, list):
        return [_plain(one) for one in node]
    return (type(node).__name__, repr(node))


def _quoted(value: object) -> str:
    """A literal; a long text in several lines."""
    if not isinstance(value, str):
        return repr(value)
    if len(value) < _WIDTH - 10:
        return _literal(value)
    pieces = []
    while value:  # cut behind a comma
        at = len(value) if len(value) <= _WIDTH else value.rfind(",", 0, _WIDTH) + 1 or _WIDTH
        pieces.append(f"            {_literal(value[:at])}\n")
        value = value[at:]
    return f"(\n{''.join(pieces)}        )"


def _literal(text: str) -> str:
    """A text in double quotes; JSON's escapes are Python's, so that no report can write code."""
    return json.dumps(text, ensure_ascii=False)
