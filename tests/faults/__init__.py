"""Faults: small edits to the shipped kernels, each of a class that kernels really had, and who
notices them.

`python -m tests.faults` searches for the oracles that catch each fault and writes verdicts.json and
docs/sensitivity.md; `tests/meta/campaign/test_faults.py` replays what was found.
"""
