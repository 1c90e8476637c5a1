"""Hostile kernels run on the CPU, as those of the judge's own tests do."""

from tests.meta.conftest import kernels_run_on_the_cpu

__all__ = ["kernels_run_on_the_cpu"]
