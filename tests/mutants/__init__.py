"""Mutants: shipped kernels with one small change each, and how many of them the suite convicts.

`python -m tests.mutants` makes them by the operators of `operators`, asks about each what a
campaign asks, and writes `record.json` and docs/mutation.md.
"""
