"""Variants written in Triton."""
