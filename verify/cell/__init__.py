"""Cells: child processes in which kernels run, so that the accused is never in the judge's
process."""
