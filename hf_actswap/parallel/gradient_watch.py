"""Whether a parameter's gradient is this rank's own part still, or the sum over the ranks already.

A gradient must be summed exactly once, whoever asks for it: our integration, the user, both. Nothing about a
gradient tensor says whether that was done: its version changes when it is clipped and when more is
accumulated, its address is used again, and a user may put another tensor in its place. What is certain is
that autograd calls a parameter's hooks when it accumulates. So the state is kept by a pair of hooks on the
parameter: summing sets it, accumulation clears it. What it cannot tell is an error, never a guess:

- More was accumulated onto a gradient that was summed and not zeroed: no later sum can mend that. Zeroed in
  place (``zero_grad(set_to_none=False)``) it is right, and the two differ only in values. These are looked
  at before the accumulation, on the device, in this case alone, and read at the next sum: the host does not
  wait in backward, and all ranks raise at the same place. FSDP2 calls only the hooks after accumulation;
  there, zeroing in place counts as not zeroing.
- Another tensor was assigned since the sum, and nothing accumulated. It may be the sum, scaled, or the next
  step's part from `torch.autograd.grad`. Who assigns gradients says so by `GradientWatch.forget`.

The hooks are where the state lives: a copied or loaded parameter has none of them, and none of the state.
"""

from __future__ import annotations

import enum
import weakref

import torch


class GradientState(enum.Enum):
    """What a parameter's gradient is."""

    PART = "this rank's part, or none"
    SUM = "the sum over the ranks"
    MIXED = "a sum over the ranks with parts accumulated onto it"
    REPLACED = "assigned after a sum: a part or a sum"


class GradientWatch:
    """Follows the gradient of one parameter, until it is removed.

    Args:
        parameter: requires a gradient.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._sum: weakref.ref[torch.Tensor] | None = None
        self._version_at_part: int | None = None
        self._was_announced = False
        self._was_not_zero: torch.Tensor | None = None
        self._doubt: tuple[weakref.ref[torch.Tensor], torch.Tensor | None] | None = None
        self._handles = (
            parameter.register_hook(self._before_accumulation),
            parameter.register_post_accumulate_grad_hook(self._after_accumulation),
        )

    def state(self) -> GradientState:
        """Return what the gradient is now.

        The host waits for the device only where a summed gradient was zeroed in place.
        """
        parameter = self._parameter()
        gradient = None if parameter is None else gradient_of(parameter)
        if gradient is None:
            return GradientState.PART
        if self._sum is not None:
            return GradientState.SUM if self._sum() is gradient else GradientState.REPLACED
        if self._doubt is not None:
            of, was_not_zero = self._doubt
            if of() is gradient and (was_not_zero is None or bool(was_not_zero)):
                return GradientState.MIXED
        return GradientState.PART

    def was_stepped_unsummed(self) -> bool:
        """Whether the parameter was changed in place since a part was accumulated that nobody has summed.

        What writes to ``parameter.data``, or makes the parameter anew, is not noticed.
        """
        parameter = self._parameter()
        at_part = self._version_at_part
        return parameter is not None and at_part is not None and parameter._version != at_part

    def set_summed(self, gradient: torch.Tensor) -> None:
        """Note that ``gradient``, the parameter's, is now the sum over the ranks."""
        self._sum, self._doubt, self._version_at_part = weakref.ref(gradient), None, None

    def forget(self) -> None:
        """Note that the next gradient is this rank's part, however it comes to the parameter."""
        self._sum = self._doubt = self._version_at_part = None

    def remove(self) -> None:
        """Take the hooks off the parameter."""
        for handle in self._handles:
            handle.remove()

    def _before_accumulation(self, _: torch.Tensor) -> None:
        """Also called where a gradient is computed and not accumulated: it decides nothing."""
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        self._was_announced, self._was_not_zero = True, None
        if gradient is None or (self._sum is None and self._doubt is None):
            return
        self._was_not_zero = gradient.any()
        if self._doubt is not None and self._doubt[1] is not None:  # parts onto parts are no mixture
            self._was_not_zero = self._was_not_zero & self._doubt[1]

    def _after_accumulation(self, parameter: torch.Tensor) -> None:
        self._version_at_part = parameter._version
        gradient, was_not_zero, was_announced = parameter.grad, self._was_not_zero, self._was_announced
        before = None if self._sum is None else self._sum()
        self._sum, self._was_announced, self._was_not_zero = None, False, None
        if gradient is None:  # an earlier hook has taken it
            return
        if was_not_zero is not None:
            self._doubt = weakref.ref(gradient), was_not_zero
        elif was_announced:
            self._doubt = None
        elif before is gradient:
            self._doubt = weakref.ref(gradient), None


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return ``.grad``, else ``.main_grad``, else ``None``."""
    if parameter.grad is not None:
        return parameter.grad
    main: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return main


def watch_of(parameter: torch.Tensor) -> GradientWatch | None:
    """Return the watch whose hooks are on the parameter, or ``None``."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}  # as FSDP2 reads them
    owners = (getattr(hook, "__self__", None) for hook in hooks.values())
    return next((owner for owner in owners if isinstance(owner, GradientWatch)), None)
