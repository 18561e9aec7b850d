"""A line of progress for the steps in which the planner measures and searches."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .bytes_bar import shows_bars

STABLE = "stable"


class PlannerBar:
    """A ``progress`` callback of the planner: give it to one rank only.

    On a terminal a line on stderr, which goes when the plan is found; elsewhere nothing. It is drawn anew
    after each step and by no thread, so the trainer's own bar and this one take turns.

    Args:
        console: by default stderr.
        title: what stands before the phase.
    """

    def __init__(self, console: Console | None = None, title: str = "planner") -> None:
        self._console, self._title = console or Console(stderr=True), title
        self._progress: Progress | None = None
        self._phase, self._steps = "", 0

    def __call__(self, phase: str, steps_left: int) -> None:
        """Show how far it is.

        Args:
            phase: of the planner; ``stable`` is the end.
            steps_left: of the phase, at most.
        """
        if phase == STABLE:
            self.close()
            return
        if not shows_bars(self._console):
            return
        if self._progress is None or phase != self._phase:
            self.close()
            self._phase, self._steps = phase, steps_left
            self._progress = Progress(
                TextColumn(f"{self._title}: {{task.description}}"),
                BarColumn(),
                TextColumn("{task.fields[left]} step(s) left at most"),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._progress.add_task(phase, total=max(steps_left, 1), left=steps_left)
            self._progress.start()
        done = max(self._steps - steps_left, 0)
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=done, left=steps_left, refresh=True)

    def close(self) -> None:
        """Take the line away. Safe to call again."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()
