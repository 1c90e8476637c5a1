"""Leases: a campaign over many machines and GPUs (`verify campaign`, docs/scale.md).

`plan` and `events` say what is given out and what happened, `state` decides, `journal` remembers,
`coordinator` runs a campaign through an engine, and `dask_engine` is that engine.  `executor` and
`loop` are a worker's side.
"""
