"""What hardware counters say of one launch of a kernel, by Nsight Compute (ncu)."""
