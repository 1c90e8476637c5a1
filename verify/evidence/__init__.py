"""Evidence: what a run records on disk, and how it is read back.  Knows no kernel and no oracle."""

from verify.evidence.reading import ENDED, Evidence, load
from verify.evidence.records import (
    COUNTED_PHASES,
    INAPPLICABLE,
    NO_KERNEL,
    SCHEMA_VERSION,
    Begin,
    Built,
    Drawn,
    EvidenceError,
    Finding,
    Interruption,
    NotRun,
    Outcome,
    Phase,
    Reason,
    Record,
    RunInfo,
    VariantEntry,
    Verdict,
)
from verify.evidence.run_records import LeftOut
from verify.evidence.store import Recorder, being_written, is_plain, new_run_id
from verify.evidence.verdicts import Verdicts

__all__ = [
    "COUNTED_PHASES",
    "ENDED",
    "INAPPLICABLE",
    "NO_KERNEL",
    "SCHEMA_VERSION",
    "Begin",
    "Built",
    "Drawn",
    "Evidence",
    "EvidenceError",
    "Finding",
    "Interruption",
    "LeftOut",
    "NotRun",
    "Outcome",
    "Phase",
    "Reason",
    "Record",
    "Recorder",
    "RunInfo",
    "VariantEntry",
    "Verdict",
    "Verdicts",
    "being_written",
    "is_plain",
    "load",
    "new_run_id",
]
