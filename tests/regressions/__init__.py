"""Honest kernels that a bound or an oracle once convicted, one file per false alarm; each must pass
for ever."""
