"""Regressions run as the judge's own tests do: kernels on the CPU, one fork server for all."""

from tests.meta.conftest import (  # noqa: F401
    _shared,
    courts_share_a_fork_server,
    kernels_run_on_the_cpu,
    one_thread,
)
