"""Predicts the time and the memory of a step under a plan, by simulation.

In: a `Profile` and a `MemoryPlan`. Out: a `Prediction` of one rank: milliseconds, and bytes on device and
host.

Read `simulate` (the step, op event by op event, beside the link to the host), then `scope_fates` (what the
rows of a plan mean for the storages of a step). `pipeline_step` runs several stages; `data_axis`,
`tensor_axis` and `exchanges` count what ranks send; `compiled_shares` is about compiled layers.
"""
