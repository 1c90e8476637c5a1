"""Strict JSON for evidence and reports: typed records out and in, NaN and infinities as the strings
"nan", "inf", "-inf".

RFC 8259 has no token for them, and Python's own `NaN` breaks every other reader.  A field typed
`Number` reads the three strings back as numbers; so does free-form data (`Free`), which therefore
cannot hold these three as text.

msgspec checks and builds the records.  Two things it does not do, which stay here: it writes what
is not finite as null, and it refuses the escape of a lone surrogate, which a kernel's words can
hold.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABCMeta
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from verify.brief import shown

T = TypeVar("T")


class NotFinite(float, Enum):
    """A number that JSON has no token for: a float like any other, written as a word."""

    NAN = "nan"
    INF = "inf"
    MINUS_INF = "-inf"

    def __new__(cls, word: str) -> NotFinite:
        self = float.__new__(cls, word)
        self._value_ = word
        return self

    __str__ = __repr__ = float.__repr__
    __format__ = float.__format__  # type: ignore[assignment]
    __hash__ = float.__hash__


# Larger integers are not exact in other readers of JSON; none of ours comes near.
Integer = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]

if TYPE_CHECKING:
    Number = float
    Free = Any
    NumberOrText = float | str
else:
    Number = float | NotFinite
    Free = ABCMeta("Free", (), {})  # any JSON value
    NumberOrText = ABCMeta("NumberOrText", (), {})
    for _kind in (dict, list, str, int, float, type(None)):
        Free.register(_kind)
    for _kind in (str, float):
        NumberOrText.register(_kind)


_WHOLE = frozenset({str, int, bool, type(None)})
_FIELDS: dict[type, tuple[str, ...]] = {}
_SHORT = 120  # characters that stay in one line
_COMPACT: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}


class ShapeError(ValueError):
    """Data that has not the declared shape; the message begins with the path to the place."""


def encode(value: Any) -> Any:
    """`value` as JSON-ready data: dataclasses become objects, tuples and sets arrays, non-finite
    floats strings."""
    kind = type(value)
    if kind in _WHOLE:  # most of all there is; what derives from these kinds is told apart below
        return value
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if kind is dict:
        return {str(key): encode(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in names(kind)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(encode(item) for item in value)
    if isinstance(value, float):
        number = float(value)  # a numpy scalar is a float too
        return number if math.isfinite(number) else str(number)
    if value is None or isinstance(value, str | bool | int):
        return value
    raise TypeError(f"{type(value).__name__} is no JSON value: {value!r}")


def names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass."""
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(each.name for each in fields(kind))
    return _FIELDS[kind]


def dumps(value: Any, *, depth: int = 0) -> str:
    """`encode`d value as text, the same for equal values.

    depth: objects and arrays down to it have a line per item, indented, unless they are short: a
    change is a small diff in git, without a line per number, nor a blank beside each.
    """
    return _lines(encode(value), 0, depth)


def line(value: Any) -> str:
    """`dumps` of a value whose keys are all text, in one pass if its numbers are finite."""
    try:
        return json.dumps(value, allow_nan=False, default=encode, **_COMPACT)
    except ValueError:
        return dumps(value)


def _lines(data: Any, at: int, depth: int) -> str:
    flat = json.dumps(data, allow_nan=False, **_COMPACT)
    if len(flat) <= _SHORT or at >= depth or not isinstance(data, dict | list):
        return flat
    inner, outer = "\n" + " " * (at + 1), "\n" + " " * at
    if isinstance(data, list):
        return "[" + ",".join(inner + _lines(item, at + 1, depth) for item in data) + outer + "]"
    items = (
        f"{json.dumps(key, ensure_ascii=False)}:{_lines(item, at + 1, depth)}"
        for key, item in data.items()
    )
    return "{" + ",".join(inner + item for item in items) + outer + "}"


def loads(text: str | bytes) -> Any:
    """Parse text, or UTF-8; raises ValueError for what is not strict JSON (Python's NaN and
    Infinity tokens included)."""
    return _PARSER.decode(text if isinstance(text, str) else text.decode("utf-8"))


def _refuse(token: str) -> None:
    raise ValueError(f"{token} is not JSON (write it as a string)")


_PARSER = json.JSONDecoder(parse_constant=_refuse)


def decode(shape: type[T], data: Any, where: str = "") -> T:
    """`data` (from `loads`) as a dataclass, TypedDict or Struct; unknown keys are ignored, so that
    later writers may add some, unless a Struct forbids them.

    Raises ShapeError, one line that begins with the path to the offending place, and
    RecursionError.
    """
    try:
        return msgspec.convert(data, shape, dec_hook=_taken, builtin_types=(date,))
    except msgspec.ValidationError as error:
        said, at, path = str(error).rpartition(" - at `$")
        said, path = (said, path[:-1]) if at else (path, "")
        place = f"{where or shape.__name__}{path}"
        absent = _ABSENT.fullmatch(said)
        # What is wrong can be quoted from the data, control characters included.
        why = f".{absent[1]}: is missing" if absent else f": {shown(said)[1:-1]}"
        raise ShapeError(place + why) from None


def shortened(data: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """An object without the fields that have their usual value, which a file leaves out."""
    return {name: has for name, has in data.items() if name not in usual or has != usual[name]}


def completed(shape: type, data: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The object that `shortened` made smaller, its fields in the order of the shape's."""
    names = [name for name in shape.__annotations__ if name in data or name in usual]
    return {name: data[name] if name in data else usual[name] for name in names}


def reader(shape: type[T]) -> Callable[[bytes], T]:
    """`decode` of one line of JSON.  It refuses all that `decode` refuses, and a few lines more:
    where it raises, ask `loads` and `decode`."""
    return msgspec.json.Decoder(shape, dec_hook=_taken).decode


_ABSENT = re.compile(r"Object missing required field `(\w+)`")


def _taken(kind: Any, data: Any) -> Any:
    """Values of the types that msgspec does not know."""
    if kind is NumberOrText and type(data) not in (str, int, float):
        raise ValueError(f"Expected `float | str`, got `{type(data).__name__}`")
    taken = _free(data)
    return float(taken) if kind is NumberOrText and type(taken) is int else taken


def _free(data: Any) -> Any:
    if isinstance(data, str):
        return _NUMBERS.get(data, data)
    if isinstance(data, list):
        return [_free(item) for item in data]
    return {key: _free(item) for key, item in data.items()} if isinstance(data, dict) else data


_NUMBERS = {number.value: float(number) for number in NotFinite}
