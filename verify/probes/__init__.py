"""Probes: experiments that measure a device's arithmetic and compare it with the tables that the
bounds use."""
