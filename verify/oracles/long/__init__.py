"""Long sequences: past 131072 rows or keys, where indices of 16 and 31 bits wrap."""
