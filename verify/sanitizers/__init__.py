"""Sanitizers: kernels run once more under NVIDIA's compute-sanitizer, in memory where every buffer
ends at its last element."""
