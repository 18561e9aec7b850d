"""Searches for the fastest plan within the limits.

In: a `Profile`, the `MemoryPlan` that is written by hand, and `Limits` in bytes. Out: a `Found`: the plan and
its `Prediction`.

Read `layer_graph` (the step in segments, alike layers once), `layer_options` (what can be chosen for one),
`layer_milp` (one option for each, by an integer program), `find_plan` (the programs until a simulated plan is
near the limit) and `states_place` (where states and weights wait). Times and bytes of an option are an
estimate that is local to a layer; `cost` decides. A new fate needs both.
"""
