"""What is true: attention, its gradients and its masks, in double precision and in fifty digits.

Nothing in this package knows a kernel, a tolerance or a test.
"""
