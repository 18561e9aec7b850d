"""Three phases of a training under the planner: warm-up, search, stable.

In: a model on its device, what the user asked for and a run to put plans on (`run.Run`). Out: a `Planner`,
which changes plans between steps until one stays.

Read `planner` (which phase comes when), `warm_up` (a step is recorded), `search` (plans are tried) and
`stable` (two checks).

``adaptive`` plans on paper before its first step, where that can be (`Planner._plans_ahead`): then it is in
the search from the start, and warm-up comes only if a step disagrees.

======== ============================================ =================================================
phase    what is on the model                         ends
======== ============================================ =================================================
warm-up  evictable tickets, the guard; the last step  after ``warmup_steps`` steps, at least 3 where
         is recorded                                  layers are compiled
search   one plan after another, the guard            after ``search_steps`` steps, or when nothing that
                                                      is untried could be faster
stable   the best measured plan                       when a batch is larger than any before, or a step
                                                      misses the budget or runs out of memory: then
                                                      warm-up begins again, a limited number of times
======== ============================================ =================================================

Phases change between steps, and ahead of a micro-batch that is larger than what is planned for. Inside a step
nothing depends on a clock or on free memory, except the guard, which moves tensors and changes no number.

**Search** tries the plans with the best predictions, and keeps the best that was measured.

By corrected predictions, it may be faster to keep the optimizer's states on the host (``preference: auto``).
They move then, and plans are searched anew.

**Stable**: the plan runs as any other, and nothing is profiled. Where ``search_steps`` ended its trial after
a single step, the first step here is guarded too. Two checks cost microseconds.

* The **batch's size**, ahead of each forward. A batch with no more tokens than the plan was made for runs
  under this plan. For a larger one, and in the search too, ``adaptive`` plans on paper ahead of its forward
  (`Planner._is_outgrown`): the guard may find no host memory to evict to, since the plan uses it. Where that
  cannot be, the larger batch runs under the guard, and after its step the planner plans anew.
* The **peak** of what was in use, after each step. If it misses the budget, or if a step ran out of memory
  and needed the guard, the planner plans anew.

Ranks must agree before they change plans, and a collective at each step would cost every step. So several
ranks exchange their checks every `CHECK_STEPS` steps; until then each handles running out of memory alone. A
training whose batches never stop growing must get on too: after `MOST_PLANS` plans the planner plans no more,
and larger batches run under the guard.
"""
