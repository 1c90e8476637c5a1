"""Cells: child processes in which kernels run.  No kernel runs in the judge's process."""
