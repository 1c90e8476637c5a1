"""Compiles and launches CUDA C++ without a toolkit, for the collection, the probes and users."""
