"""Lets SIGTERM and Ctrl-C end a run at once and in order: the plan is removed, host memory is freed.

The signal becomes a `SystemExit` where the program stands, with the exit code that a shell gives. Python
drops what is raised inside a ``__del__``, and backward runs thousands of these: a run that was asked to stop
and goes on is stopped at the next micro-batch.
"""

from __future__ import annotations

import signal
import sys
from time import monotonic
from types import FrameType

from transformers import TrainerCallback

REPEAT_S = 3.0
"""Seconds in which a second signal is ignored: launchers pass on a Ctrl-C that the terminal sent to all."""


class Stop(TrainerCallback):
    """Handler of both signals, and a callback of the Trainer."""

    def __init__(self) -> None:
        self._number = 0
        self._asked_s = -REPEAT_S

    def listen(self) -> None:
        """Install the handlers of both signals."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked)

    def _asked(self, number: int, _: FrameType | None) -> None:
        now_s = monotonic()
        if now_s - self._asked_s < REPEAT_S:
            return
        self._number, self._asked_s = number, now_s
        self._stop()

    def _stop(self, *_: object, **__: object) -> None:
        if self._number:
            sys.exit(128 + self._number)

    on_step_begin = on_substep_end = on_step_end = on_prediction_step = _stop
