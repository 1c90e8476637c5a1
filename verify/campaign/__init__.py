"""A campaign: which kernels are asked which cases, by how many workers, and the record of it."""
