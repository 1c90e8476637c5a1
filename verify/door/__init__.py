"""The public functions of the package, for tests of other projects."""
