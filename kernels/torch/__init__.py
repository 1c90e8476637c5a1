"""Attention kernels that torch brings along."""
