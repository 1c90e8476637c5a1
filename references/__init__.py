"""References: attention, its gradients and its masks, in double precision and in fifty digits.

Nothing in this package depends on a kernel, a tolerance or a test.
"""
