"""Wrong: no VARIANT and no function of (q, k, v)."""

ANSWER = 42
