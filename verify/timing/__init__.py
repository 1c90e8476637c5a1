"""Speed of kernels: what is timed, how, and what a device can do.  No verdict depends on it."""
