"""Mutation operators for CUDA C++: the small slips of which kernels die, as edits of the text.

The text is formatted by the rules of this project: binary operators stand between blanks, template
arguments do not.  CuTe's own words for a device function, a copy and a wait are known.  Comments,
strings and lines of the preprocessor are never touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from tests.mutants.mutant import SLIGHT, Mutation

# A name, its members, and what is called or indexed of it.
_PRIMARY = r"[A-Za-z_][\w:.]*(?:\[[^\[\]]*\]|\([^()]*\))*"
_LEFT_OUT = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M)
_FUNCTION = re.compile(
    r"(?:__device__|CUTE_DEVICE|__launch_bounds__\([^()]*\))"
    r"[^;{}()]*?(\w+)\([^;{}]*\)[^;{}()]*(?::[^;]*?\)\s*)?\{"
)
_DECLARED = re.compile(r"\b(?:u32|float|int|unsigned|char|Scores|Values)\b[^=;]*$")

# What an operator proposes: its own name, start, end, and the new text.
_Proposal = tuple[str, int, int, str]
_Operator = Callable[[str], Iterator[_Proposal]]


@dataclass(frozen=True)
class Region:
    """A function's text, or a line outside of all: name, start and end."""

    name: str
    start: int
    end: int


def code_of(text: str) -> str:
    """The text with blanks for comments, strings and the preprocessor's lines."""
    return _LEFT_OUT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def mutations(text: str) -> list[Mutation]:
    """All mutations of a source, in the order of the text; none twice."""
    code = code_of(text)
    regions = _functions(text)
    seen: dict[tuple[int, int, str], Mutation] = {}
    for operator in OPERATORS:
        for kind, start, end, after in operator(code):
            place = start, end, after
            if after == text[start:end] or place in seen:
                continue
            name = region_at(text, regions, start).name
            line = text.count("\n", 0, start) + 1
            seen[place] = Mutation(kind, name, line, start, end, after)
    return sorted(seen.values(), key=lambda made: (made.start, made.end, made.after))


def region_of(text: str, made: Mutation) -> Region:
    """Where a mutation is made: the innermost function, or its line."""
    return region_at(text, _functions(text), made.start)


def region_at(text: str, functions: tuple[Region, ...], place: int) -> Region:
    """The innermost of these functions around a place; a line, where it lies in none."""
    around = [each for each in functions if each.start <= place < each.end]
    if around:
        return min(around, key=lambda each: each.end - each.start)
    begin = text.rfind("\n", 0, place) + 1
    end = text.find("\n", place)
    word = re.findall(r"\w+(?= =)", text[begin:end])
    return Region(word[0] if word else "declaration", begin, end)


@cache
def _functions(text: str) -> tuple[Region, ...]:
    """The functions of a source, their headers included."""
    code = code_of(text)
    found = []
    for header in _FUNCTION.finditer(code):
        end = _closing(code, header.end() - 1)
        found.append(Region(header[1], header.start(), end))
    return tuple(found)


def _closing(code: str, opening: int) -> int:
    """Behind the bracket that closes the one at `opening`."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    first, last = code[opening], pairs[code[opening]]
    depth = 0
    for place in range(opening, len(code)):
        depth += (code[place] == first) - (code[place] == last)
        if depth == 0:
            return place + 1
    return len(code)


def _replaced(kind: str, pattern: str, twins: dict[str, str]) -> _Operator:
    """An operator: what a pattern's first group holds becomes its twin."""
    compiled = re.compile(pattern)

    def propose(code: str) -> Iterator[_Proposal]:
        for found in compiled.finditer(code):
            if found[1] in twins:
                yield kind, *found.span(1), twins[found[1]]

    return propose


def _integer(code: str) -> Iterator[_Proposal]:
    """An integer that is one too large or too small, but no extent of an array."""
    for found in re.finditer(r"(?<![\w.])\d+(?![\w.])", code):
        before = code[code.rfind("\n", 0, found.start()) + 1 : found.start()]
        if before.endswith("[") and _DECLARED.search(before):
            continue
        value = int(found[0])
        yield "boundary", *found.span(), str(value + 1)
        if value > 0:
            yield "boundary", *found.span(), str(value - 1)


def _operand(code: str) -> Iterator[_Proposal]:
    """A factor or an offset that is lost."""
    for found in re.finditer(rf" \* ({_PRIMARY})", code):
        yield _about(found[1], "operand"), *found.span(), ""
    for found in re.finditer(rf"(?<=[ (,\[])({_PRIMARY}) \* ", code):
        yield _about(found[1], "operand"), *found.span(), ""
    for found in re.finditer(rf" [+-] {_PRIMARY}(?=[;,)\]])", code):
        yield "operand", *found.span(), ""


def _about(text: str, kind: str) -> str:
    """The kind of a lost text: a scale's, if it names one."""
    return "scale" if re.search(r"alpha|scale|factor|inverse|descale", text) else kind


def _stride(code: str) -> Iterator[_Proposal]:
    """The stride of another axis or of another tensor."""
    axes = {"row": "head", "head": "batch", "batch": "head"}
    tensors = {"q": "k", "k": "v", "v": "q", "out": "q"}
    for found in re.finditer(r"\b(?:a\.\w+|of)\.(row|head|batch)\b", code):
        yield "stride", *found.span(1), axes[found[1]]
    for found in re.finditer(r"\ba\.(q|k|v|out)\.(?:row|head|batch)\b", code):
        yield "stride", *found.span(1), tensors[found[1]]


def _order(code: str) -> Iterator[_Proposal]:
    """Two arguments of a call that change places, where that makes a difference."""
    for found in re.finditer(
        r"(?<!min)(?<!max)(?<!maxf)(?<!minf)(?<=\w)\(([^(),;{}]+), ([^(),;{}]+)(?=[,)])", code
    ):
        if not re.match(r"(?:const|unsigned|int|float|u32)\b|[\w:]+ const&", found[1]):
            yield "order", *found.span(), f"({found[2]}, {found[1]}"


def _constant(code: str) -> Iterator[_Proposal]:
    """A constant of a formula that is slightly off, or another neutral element."""
    for found in re.finditer(r"(?<![\w.])(\d+\.\d+)f\b", code):
        value = float(found[1])
        other = {0.0: 1.0, 1.0: 0.0}.get(value, value * SLIGHT)
        yield "constant", *found.span(), f"{other!r}f"


def _barrier(code: str) -> Iterator[_Proposal]:
    """A barrier, a wait or a group of copies that is left out; a wait that leaves one more."""
    for found in re.finditer(r"__sync\w+\(\);", code):
        yield "barrier", *found.span(), ";"
    for found in re.finditer(r"cp_async_wait(?:_group)?<([^>]+)>", code):
        yield "wait", *found.span(1), f"{found[1]} + 1"
    for found in re.finditer(r"(?:ptx::)?cp_async_\w+(?:<[^>]+>)?\(\);", code):
        yield "wait", *found.span(), ";"


def _condition(code: str) -> Iterator[_Proposal]:
    """A branch that is always or never taken; one of two conditions for both."""
    for found in re.finditer(r"\bif \(", code):
        begin, end = found.end() - 1, _closing(code, found.end() - 1)
        yield "branch", begin + 1, begin + 1, "true || "
        yield "branch", begin, end, "(false)"
    for found in re.finditer(r" \? ", code):
        yield "branch", *found.span(), " && false ? "
        yield "branch", *found.span(), " || true ? "
    for found in re.finditer(r" (&&|\|\|) ", code):
        yield "mask", *found.span(1), {"&&": "||", "||": "&&"}[found[1]]


def _statement(code: str) -> Iterator[_Proposal]:
    """A step that is left out."""
    place = r"[A-Za-z_][\w.\[\] +*]*"
    for found in re.finditer(rf"(?m)^ +({place} [-+*/]?= [^;{{}}]*;)$", code):
        if re.match(r"(?:static|const|constexpr|float|int|u32|bool|char|using)\b", found[1]):
            continue
        yield _about(found[1], "statement"), *found.span(1), ";"
    for found in re.finditer(
        r"(?m)^ +((?!return|__sync|static_assert|(?:ptx::)?cp_async)"
        r"[\w:.]+(?:<[^;]*>)?\([^;{}]*\);)$",
        code,
    ):
        yield "statement", *found.span(1), ";"


def _dtype(code: str) -> Iterator[_Proposal]:
    """A cast that is lost."""
    for found in re.finditer(r"static_cast<(?:long long|float|u32)>(?=\()", code):
        yield "dtype", *found.span(), ""
    for found in re.finditer(r"\bint64_t(?=\()", code):
        yield "dtype", *found.span(), ""
    for found in re.finditer(r"\b(?:long long|int64_t) (?=\w+ =)", code):
        yield "dtype", *found.span(), "int "


OPERATORS: tuple[_Operator, ...] = (
    _replaced(
        "comparison",
        r" (<=|>=|<|>|==|!=) ",
        {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    ),
    _replaced("sign", r"(?<=[\w)\]]) ([+-]) ", {"+": "-", "-": "+"}),
    _replaced("index", r" ([%/]) ", {"%": "/", "/": "%"}),
    _replaced(
        "function",
        r"\b(fmaxf|fminf|min|max|ldmatrix_x4|ldmatrix_x4_trans|ldmatrix_x2|ldmatrix_x2_trans)\(",
        {
            "fmaxf": "fminf",
            "min": "max",
            "max": "min",
            "ldmatrix_x4": "ldmatrix_x4_trans",
            "ldmatrix_x4_trans": "ldmatrix_x4",
            "ldmatrix_x2": "ldmatrix_x2_trans",
            "ldmatrix_x2_trans": "ldmatrix_x2",
        },
    ),
    _replaced(
        "index",
        r"\b(warp_m|warp_n|row_tiles|key_tiles|width_tiles|read_slot|write_slot)\b(?! =|;|,|\))",
        {
            "warp_m": "warp_n",
            "warp_n": "warp_m",
            "row_tiles": "key_tiles",
            "key_tiles": "width_tiles",
            "width_tiles": "key_tiles",
            "read_slot": "write_slot",
            "write_slot": "read_slot",
        },
    ),
    _replaced("mask", r"\.(low|high)\b", {"low": "high", "high": "low"}),
    _integer,
    _operand,
    _stride,
    _order,
    _constant,
    _barrier,
    _condition,
    _statement,
    _dtype,
)
