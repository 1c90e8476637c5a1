"""Statistics of a campaign: errors beside the size that the declared roundings give them, pooled by
row."""
