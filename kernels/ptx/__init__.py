"""Variants written with raw PTX instructions, through kernels/cuda/ptx.cuh."""
