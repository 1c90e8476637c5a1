"""Variants written in Gluon, the lower level of Triton."""
