"""The GPUs of a run on one machine: which a worker has, what each did, and whether it is right.

`placement` chooses GPUs and counts workers, `watch` lets every GPU judge the control problem in
`control_process`, `state` remembers what came out, and `accounting` counts.
"""
