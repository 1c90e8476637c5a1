"""Kernels on trial, one file per variant (or per family that differs by parameters)."""
