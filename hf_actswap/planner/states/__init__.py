"""Keeps optimizer states on the host between the optimizer's steps, or steps each weight in backward.

In: an optimizer, and how many bytes of its states may stay on the device. Out: hooks on it and on the model,
until they are removed.

Read `state_bytes` (how large states will be), `state_storages` (one that moves), `optimizer_states` (when
they move) and `in_backward` (the optimizer in backward).
"""
