"""Tolerance models: how far honest arithmetic may stray, one number per output element.  Computed,
never typed in."""

# Of the formulas.  A change that makes an honest declaration's bound another number, beyond what
# orders of fp64 sums do, raises it.  Reports record it: `verify recheck` asks for equal bounds only
# if the model is the same.  "2": partial sums.  "3": exact sums,
# rescales by 1, and the last steps of LSE.  "4": gradients in declared orders.  "5": exponents that
# hold the scale of an 8-bit P are rounded twice wherever g counts.
MODEL = "5"
