"""The machine and the process that the judge runs on.  Knows nothing of kernels."""
