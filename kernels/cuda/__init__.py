"""What the CUDA C++ variants share: the PTX wrappers (ptx.cuh), and how their forwards are launched
(family.py)."""
