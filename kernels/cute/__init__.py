"""Variants written in CuTe, the C++ of layouts and tensors that CUTLASS brings."""
