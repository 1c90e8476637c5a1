"""Helpers of the judge's tests: emulated arithmetic, trials without a cell, fake campaigns."""
