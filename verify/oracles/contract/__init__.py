"""Contract: modules that measure promises other than accuracy from raw outputs."""
