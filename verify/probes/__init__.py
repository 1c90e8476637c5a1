"""Probes: what a device really does, measured by inputs whose result decides it, beside the tables
that bounds rely on."""
