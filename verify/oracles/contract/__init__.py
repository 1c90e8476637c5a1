"""The contract: promises beyond numbers, each measured from raw outputs."""
