"""What kernels written in CUDA C++ share: the PTX wrappers (ptx.cuh), compilation with NVRTC and launching (compile.py)."""
