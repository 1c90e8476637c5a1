"""A figure of matplotlib as one small <svg> element of a page, and how pages compare that hold one.

matplotlib writes an element per point, six decimals per number and the style in every element.
Here the points of a series are the vertices of one path that shows a marker at each, numbers have
the digits that a screen can show, and equal styles are one class.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from typing import Any

INK = "#0a0b0c"  # stands for currentColor, which matplotlib does not know
_SCALE = 1.55  # CSS pixels per point at full width: 9 pt are 14 px
_RUN = 3  # equal marks from which on a path with markers is shorter
_TENTHS = 10  # vertices are rounded to tenths: 0.08 CSS pixels at most
_DIGITS = 2  # decimals of all other coordinates: the curves of a mark are a few points wide

_TAG = re.compile(r"<[^>]*>")  # matplotlib escapes < and > in text
_NUMBER = re.compile(r"-?\d+\.\d+|-0\b")
_PLACES = re.compile(r'\b(d|x|y|width|height|transform)="([^"]*)"')
_STYLED = re.compile(r' style="([^"]*)"')
_MARK = re.compile(r'<use xlink:href="#([^"]*)" x="([^"]*)" y="([^"]*)" style="([^"]*)"/>\n?')
_MARKS = re.compile(rf"(?:{_MARK.pattern}){{{_RUN},}}")
_LINE = re.compile(r'<path d="M(\S+) (\S+?)L(\S+) ([^\s"]+)" class="([^"]+)"/>\n')
_LINES = re.compile(
    r'<path d="M\S+ \S+?L\S+ [^\s"]+" class="(?P<style>[^"]+)"/>\n'
    r'(?:<path d="M\S+ \S+?L\S+ [^\s"]+" class="(?P=style)"/>\n)*'
)
_PICTURE = re.compile(
    r'<svg [^>]*?data-drawn="(\w+)" data-picture="(\w+)"[^>]*>(.*?)</svg>', re.DOTALL
)


def element(figure: Any, key: str, label: str, drawn: Any) -> str:
    """The figure as an <svg> element; matplotlib has escaped all text in it.

    key: stands before its ids and classes, which are unique in a page of several pictures.
    drawn: the data, whose digest it bears.
    """
    stream = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(
        stream,
        format="svg",
        transparent=True,
        bbox_inches="tight",
        pad_inches=0.05,
        metadata=nothing,
    )
    image = stream.getvalue()
    image = image[image.index("<svg") :]
    image = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", image, flags=re.DOTALL)
    image = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{key}-", image)
    image = re.sub(r"\n\s*", "\n", image.replace(INK, "currentColor"))
    found = re.match(r'<svg [^>]*?viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>', image)
    assert found is not None
    body = compact(image[found.end() : image.rindex("</svg>")], key)
    marks = (
        f'data-drawn="{_digest(json.dumps(drawn, sort_keys=True))}" data-picture="{_digest(body)}"'
    )
    return f"{_opening_tag(label, marks)(found)}{body}</svg>\n"


def without_pictures(page: str) -> str:
    """A page with the digest of the data in place of every plot, so that pages compare whatever
    machine drew them.

    A picture that was changed since it was drawn stays as it is.
    """
    return _PICTURE.sub(
        lambda svg: f"<svg {svg[1]}>" if _digest(svg[3]) == svg[2] else svg[0], page
    )


def compact(body: str, key: str) -> str:
    """What stands inside an <svg> element of matplotlib, with the same look in fewer bytes."""
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\n?", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r'<path d="[^"]*" style="fill: none"/>\n?', "", body)  # transparent grounds
    series = 0

    def vertices(found: re.Match[str]) -> str:
        nonlocal series
        parts: list[str] = []
        for shape, style, places in _series(found[0]):
            name, series = f"{key}-s{series}", series + 1
            parts.append(_path(name, shape, style, places))
        return "".join(parts)

    body = _MARKS.sub(vertices, body)
    body = _TAG.sub(lambda tag: _short_tag(tag[0]), body)
    body = re.sub(r"<defs>\s*</defs>\n?", "", body)
    return _joined(_classes(_ungrouped(body), key))


def _joined(body: str) -> str:
    """The same with neighbouring straight lines of one class as one path."""

    def one(found: re.Match[str]) -> str:
        lines = (_straight(*map(str, line)) for line in _LINE.findall(found[0]))
        return f'<path d="{"".join(lines)}" class="{found["style"]}"/>\n'

    return _LINES.sub(one, body)


def _straight(x: str, y: str, to_x: str, to_y: str, _style: str) -> str:
    if x == to_x:
        return f"M{x} {y}V{to_y}"
    return f"M{x} {y}H{to_x}" if y == to_y else f"M{x} {y}L{to_x} {to_y}"


def _ungrouped(body: str) -> str:
    """The same without the groups that say nothing of what is in them."""
    kept: list[bool] = []

    def tag(found: re.Match[str]) -> str:
        if found[0].startswith("<g"):
            kept.append(found[0].strip() != "<g>")
            return found[0] if kept[-1] else ""
        return found[0] if kept.pop() else ""

    return re.sub(r"<g(?: [^>]*)?>\n?|</g>\n?", tag, body)


def _series(marks: str) -> list[tuple[str, str, list[tuple[int, int]]]]:
    """(shape, style, places in tenths of a point) of neighbouring marks that look alike."""
    found: list[tuple[str, str, list[tuple[int, int]]]] = []
    for shape, x, y, style in _MARK.findall(marks):
        if not found or found[-1][:2] != (shape, style):
            found.append((shape, style, []))
        found[-1][2].append((round(float(x) * _TENTHS), round(float(y) * _TENTHS)))
    return found


def _path(name: str, shape: str, style: str, places: list[tuple[int, int]]) -> str:
    """A path that is not drawn, with the same mark at every vertex."""
    steps = [
        (x - before[0], y - before[1])
        for before, (x, y) in zip([(0, 0), *places], places, strict=False)
    ]
    numbers = [_short(f"{step / _TENTHS:.1f}") for pair in steps for step in pair]
    lines = " ".join(numbers[2:]).replace(" -", "-")
    marks = " ".join(f'marker-{at}="url(#{name})"' for at in ("start", "mid", "end"))
    return (
        f'<marker id="{name}" markerUnits="userSpaceOnUse" overflow="visible">'
        f'<use xlink:href="#{shape}" style="{style}"/></marker>\n'
        f'<path d="M{numbers[0]} {numbers[1]}l{lines or "0 0"}" fill="none" {marks}/>\n'
    )


def _short_tag(tag: str) -> str:
    if tag.startswith("<g "):
        tag = re.sub(r' id="[^"]*"', "", tag)  # nothing refers to a group
    if "marker-start" in tag:
        return tag
    tag = re.sub(r' transform="rotate\(-0 [^"]*"', "", tag)
    return _PLACES.sub(lambda found: f'{found[1]}="{_places(found[2])}"', tag)


def _places(numbers: str) -> str:
    """Coordinates and the letters of a path between them, with fewer digits and blanks."""
    short = _NUMBER.sub(lambda found: _short(f"{float(found[0]):.{_DIGITS}f}"), numbers)
    return re.sub(r"\s*([A-Za-z])\s+(?=[-\d.])|\s*\b([zZ])\s*", r"\1\2", short).strip()


def _short(number: str) -> str:
    """1.50 -> 1.5, 0.3 -> .3, -0.0 -> 0."""
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return re.sub(r"^(-?)0(?=\.)", r"\1", number) if number not in ("", "-", "-0") else "0"


def _classes(body: str, key: str) -> str:
    """Styles that several elements have, as classes."""
    styles = Counter(style for tag in _TAG.findall(body) for style in _STYLED.findall(tag))
    often = [style for style, times in styles.most_common() if times > 1]
    names = {style: f"{key}-{place}" for place, style in enumerate(often)}

    def named(tag: re.Match[str]) -> str:
        return _STYLED.sub(
            lambda found: f' class="{names[found[1]]}"' if found[1] in names else found[0], tag[0]
        )

    rules = "".join(f".{name}{{{style.replace(': ', ':')}}}\n" for style, name in names.items())
    return f'\n<style type="text/css">\n{rules}</style>{_TAG.sub(named, body)}'


def _digest(content: str) -> str:
    return sha256(content.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _opening_tag(label: str, marks: str) -> Callable[[re.Match[str]], str]:
    """As wide as the page allows, but no wider than makes the text larger than the page's."""

    def tag(found: re.Match[str]) -> str:
        width, height = float(found[1]), float(found[2])
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        size = f'viewBox="0 0 {width:.1f} {height:.1f}"'
        look = f"max-width: {width * _SCALE:.0f}px; stroke-linejoin: round; stroke-linecap: butt"
        return f'<svg {spaces} {size} style="{look}" role="img" aria-label="{label}" {marks}>'

    return tag
