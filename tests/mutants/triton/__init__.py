"""Mutants of the Triton kernels, run by Triton's interpreter."""
