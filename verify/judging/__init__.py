"""Judging of one case: its launches, its truth, and shared code with which oracles compare them."""
