"""Evidence: what a run records on disk, and how it is read back.  Knows no kernel and no oracle."""

from verify.evidence.reading import Evidence, load
from verify.evidence.records import (
    COUNTED_PHASES,
    INAPPLICABLE,
    SCHEMA_VERSION,
    Begin,
    Built,
    Drawn,
    EvidenceError,
    Finding,
    NotRun,
    Outcome,
    Phase,
    Record,
    RunInfo,
    VariantEntry,
    Verdict,
)
from verify.evidence.run_records import LeftOut
from verify.evidence.store import Recorder, is_plain, new_run_id

__all__ = [
    "COUNTED_PHASES",
    "INAPPLICABLE",
    "SCHEMA_VERSION",
    "Begin",
    "Built",
    "Drawn",
    "Evidence",
    "EvidenceError",
    "Finding",
    "LeftOut",
    "NotRun",
    "Outcome",
    "Phase",
    "Record",
    "Recorder",
    "RunInfo",
    "VariantEntry",
    "Verdict",
    "is_plain",
    "load",
    "new_run_id",
]
