"""Operators of one forward: autograd's node numbers, with compiled regions counted as their eager layers.

A compiled region is one node, or a few. The layer that was compiled has about 80, and a window that was
written or measured for it counts those. So at a compiled region the clock jumps ahead by the nodes that the
eager layer would have made. All that the region saves counts as saved at its last operator, the first one
that backward reaches. A layer that is recomputed whole builds its nodes as usual, but backward needs
everything of it at once, so its nodes are counted as one (`checkpoint_inputs`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from .autograd_state import next_node_number, packing_node_number


class OperatorClock:
    """Turns node numbers into operators. Shared by a forward, which writes, and its backward, which reads."""

    __slots__ = (
        "_before",
        "_entered",
        "_gathered",
        "_last",
        "_nodes",
        "_shifts",
        "_starts",
        "jumps",
        "shift",
    )

    def __init__(self) -> None:
        self.shift = self._before = self._entered = self._nodes = 0
        self._starts: list[int] = []
        self._shifts: list[int] = []
        self._gathered: list[int] = []
        self._last: list[int] = []
        self.jumps = False
        """Whether some operator differs from its node's number; if not, `operator` need not be called."""

    def next_node(self) -> int:
        """Return the number that the next node will get."""
        return next_node_number()

    def gather(self, first_node: int) -> int:
        """Count all nodes from ``first_node`` to the last one built as the last one; return its operator."""
        last = packing_node_number()
        if last >= first_node:
            self._gathered.append(first_node)
            self._last.append(last)
            self.jumps = True
        return last + self.shift

    def now(self) -> int:
        """Return the operator that is being built in forward."""
        return packing_node_number() + self.shift

    def enter_compiled(self, nodes: int) -> None:
        """Start a compiled region that counts as ``nodes`` eager nodes (0: unknown; its own are counted)."""
        self._entered, self._before, self._nodes = packing_node_number() + 1, self.shift, nodes
        if nodes:
            self._jump(self._entered, self.shift + nodes - 1)

    def leave_compiled(self) -> None:
        """End the compiled region: however many nodes it made, it counts as the ``nodes`` of its start."""
        made = packing_node_number() + 1 - self._entered
        if self._nodes and made:
            self._jump(packing_node_number() + 1, self._before + self._nodes - made)
        elif self._nodes:
            self._jump(self._entered, self._before)
        self._nodes = 0

    def operator(self, node: int) -> int:
        """Return the operator of a node that this forward made."""
        if self._last:
            at = bisect_left(self._last, node)
            if at < len(self._last) and self._gathered[at] <= node:
                node = self._last[at]
        if not self._starts:
            return node
        at = bisect_right(self._starts, node)
        return node + (self._shifts[at - 1] if at else 0)

    def _jump(self, node: int, shift: int) -> None:
        self._starts.append(node)
        self._shifts.append(shift)
        self.shift, self.jumps = shift, True
