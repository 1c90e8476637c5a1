"""A bench.json of a small fake run, for the tests of its record, its page and its comparison."""

from __future__ import annotations

from typing import Any

from tests.harness.fake_campaign import DEVICE
from verify.timing.record import Benchmark, Row, Shape

SHAPE: Shape = {
    "direction": "forward",
    "batch": 1,
    "heads": 8,
    "seqlen": 8192,
    "head_dim": 64,
    "mask": "full",
}


def row(variant: str = "torch-flash", median: float = 1e-3, **changes: Any) -> Row:
    """A timed row whose calls vary by 1 % to either side."""
    made: dict[str, Any] = {
        "variant": variant,
        "family": variant.partition("-")[0],
        "source_hash": "0123456789abcdef",
        "config": "default",
        "build": "",
        "dtype": "float16",
        "workload": SHAPE,
        "outcome": "timed",
        "reason": "",
        "calls": 128,
        "warmups": 32,
        "seconds": {
            "median": median,
            "minimum": 0.98 * median,
            "p10": 0.99 * median,
            "p90": 1.01 * median,
        },
        "tflops": 0.137438953472 / median,
        "share": 0.2,
        "intensity": 4137.0,
        "first": [0.25, -0.5, 0.125, 0.0],
        "last": [0.5, 0.25, 0.0, 1.0],
        "rms": [0.5, 0.5],
        "differs": "",
    }
    return made | changes  # type: ignore[return-value]


def failed(variant: str, reason: str = "crash: killed by SIGSEGV") -> Any:
    """A row of a kernel that was not timed."""
    names = ("variant", "family", "source_hash", "config", "build", "dtype", "workload")
    whole: dict[str, Any] = {**row(variant)}
    return {name: whole[name] for name in names} | {"outcome": "failed", "reason": reason}


def record(*rows: Row, **changes: Any) -> Benchmark:
    """A run with these rows."""
    made: Benchmark = {
        "schema": 1,
        "run": "20250101T000000Z-abc123",
        "started": "2025-01-01T00:00:00+00:00",
        "device": DEVICE,
        "suite": "quick",
        "protocol": {"calls": 128, "warmups": 32, "row_seconds": 0.15, "flushed": 50 << 20},
        "units": {"SMs": 132},
        "peaks": [
            {
                "name": "matmul float16",
                "what": "torch's product of 8192 x 8192",
                "value": 700.0,
                "unit": "TFLOP/s",
                "error": "",
            },
            {"name": "ex2", "what": "", "value": None, "unit": "Tera/s", "error": "no NVRTC"},
        ],
        "clocks": [
            {"sm_mhz": 1980.0, "memory_mhz": 2619.0, "watts": 100.0, "celsius": 30.0},
            {"sm_mhz": None, "memory_mhz": None, "watts": None, "celsius": None},
        ],
        "locked_mhz": None,
        "seconds": 61.5,
        "rows": list(rows),
        "left": [
            {
                "variant": "ptx-split-q",
                "config": "m64n64w4s2",
                "dtype": "float16",
                "reason": "not judged: no passing verdict of this source",
            }
        ],
    }
    return {**made, **changes}  # type: ignore[typeddict-item]
