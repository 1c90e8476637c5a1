"""Mutants of the CuTe kernels, run by a host compiler's code with CuTe's own layouts
(tests/harness/cute_host)."""
