"""Tables of arithmetic: number formats, matrix units, instructions.  One table per fact."""
