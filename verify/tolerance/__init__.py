"""Tolerance models: how far honest arithmetic may stray, one number per output element.  Computed,
never typed in."""
