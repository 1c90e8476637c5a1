"""CUDA C++ compiled and launched without a toolkit: for the collection, the probes and your own .cu
file."""
