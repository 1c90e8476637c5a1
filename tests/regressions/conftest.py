"""Regressions run as the judge's own tests do: kernels on the CPU."""

from tests.meta.conftest import kernels_run_on_the_cpu, one_thread  # noqa: F401
