"""JUnit XML: what CI systems read as test results."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

Case = ElementTree.Element


def case(of: str, name: str) -> Case:
    """A test case that passes."""
    return ElementTree.Element("testcase", classname=legal(of), name=legal(name))


def fail(case: Case, message: str, text: str = "") -> None:
    """Let a test case fail."""
    ElementTree.SubElement(case, "failure", message=legal(message)).text = legal(text)


def error(case: Case, message: str) -> None:
    """Say that a test case did not run, which is an error."""
    ElementTree.SubElement(case, "error", message=legal(message))


def skip(case: Case, message: str) -> None:
    """Say why a test case did not run, or why its failure counts as none."""
    ElementTree.SubElement(case, "skipped", message=legal(message))


def document(name: str, cases: Sequence[Case], seconds: float | None = None) -> str:
    """The XML of a suite of test cases."""
    suite = ElementTree.Element("testsuite", name=name)
    suite.extend(cases)
    counts = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    suite.attrib |= {
        "tests": str(len(cases)),
        **{key: str(sum(c.find(tag) is not None for c in cases)) for key, tag in counts.items()},
        **({} if seconds is None else {"time": str(seconds)}),
    }
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def legal(text: str) -> str:
    """Without the characters that XML 1.0 forbids."""
    return "".join(c if c >= " " or c in "\n\t" else "?" for c in text)
