"""A campaign: the kernels, the cases for each of them, the workers that judge, and the record."""
