"""Mutants of the CUDA C++ sources, run by a host compiler's code on emulated threads, barriers and
copies (tests/harness/cuda_host)."""
