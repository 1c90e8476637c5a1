"""Hostile kernels run on the CPU, like the kernels of the judge's other tests."""

from tests.meta.conftest import kernels_run_on_the_cpu

__all__ = ["kernels_run_on_the_cpu"]
