"""Declared numerics: each module tests words of a declaration on inputs that show a false word."""
