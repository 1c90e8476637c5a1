"""Long sequences: more than 131072 rows or keys, so that indices of 16 and 31 bits wrap."""
