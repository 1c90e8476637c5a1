"""Declared numerics: each word of a declaration, put to inputs on which a false one shows."""
