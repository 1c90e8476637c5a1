"""What the PTX ISA manual says that an instruction does to a warp's registers and shared memory.

Every expectation is computed from the manual's words and figures (PTX ISA 9.1), not from ptx.cuh.
"""
