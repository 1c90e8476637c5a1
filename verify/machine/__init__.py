"""The machine and the process that the judge runs on; nothing here knows a kernel."""
