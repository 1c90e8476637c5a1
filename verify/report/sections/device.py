"""Device and sources: what was judged, where, and with which versions."""

from __future__ import annotations

from verify.document import Section, Span, Table, Terms, text
from verify.report.beside import Beside
from verify.report.schema import Report
from verify.report.tables import ordered

ORDER = 160
_DEVICE = {
    "name": "Device",
    "capability": "Compute capability",
    "driver": "Driver",
    "cuda": "CUDA",
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "python": "Python",
    "platform": "Platform",
    "cores": "Cores",
}


def section(report: Report, beside: Beside) -> Section:
    """The fingerprint of the device, the versions, and the hash of every source."""
    sources = tuple(
        (Span(v["ref"], "strong"), Span(v["path"], "code"), Span(v["source_hash"], "code"))
        for v in ordered(report)
    )
    blocks = (
        Terms(tuple(device_rows(report))),
        Table(("variant", "source", "source hash"), sources),
    )
    return Section("Device and sources", "device", blocks)


def device_rows(report: Report) -> list[tuple[str, str]]:
    """(label, text) of the fingerprint and of the versions recorded beside it."""
    device, versions = report["device"], report["versions"]
    told = {key: item for key, item in device.items() if item is not None and key not in versions}
    rows = [(name, text.value(told[key])) for key, name in _DEVICE.items() if key in told]
    return rows + [(text.plain(name), text.plain(version)) for name, version in versions.items()]
