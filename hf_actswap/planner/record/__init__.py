"""Makes the profile of a step: recorded as it runs, or computed from shapes.

In: a model, its `ModelStructure` and a batch, or a step that runs. Out: a `Profile` of one rank, in bytes and
milliseconds: for each op event its times, what it saves, and the memory that is in use beside what is saved.

Read `shapes` (a step on fake tensors, with the ops of an accelerator from `kernels`), `recorder` (what both
record with), `adjusted` (what else is on the device, and on the link) and `fsdp_step` (of one rank of FSDP2).
"""
