"""A progress bar for work that is counted in bytes, and whether bars are shown at all."""

from __future__ import annotations

from huggingface_hub.utils import are_progress_bars_disabled
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn


def shows_bars(console: Console) -> bool:
    """Whether a bar is drawn: on a terminal, unless bars are switched off.

    By ``disable_progress_bar()`` of transformers' logging, ``disable_progress_bars()`` of huggingface_hub, or
    ``HF_HUB_DISABLE_PROGRESS_BARS=1``.
    """
    return console.is_terminal and not are_progress_bars_disabled()


class BytesBar:
    """Called with (bytes, bytes in all), equal at the end: give it to one rank only.

    On a terminal a bar on stderr, which goes when all is done; elsewhere nothing. It is drawn anew at each
    call and by no thread, so that it does not fight with the trainer's own bar.

    Args:
        title: what is done.
        console: by default stderr.
        shown: ``False``: nothing is drawn (the Trainer's ``disable_tqdm``).
    """

    def __init__(self, title: str, console: Console | None = None, shown: bool = True) -> None:
        self._title, self._console, self._shown = title, console or Console(stderr=True), shown
        self._progress: Progress | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far it is; the two equal: the end."""
        if self._shown and shows_bars(self._console):
            self._draw(done_bytes, total_bytes)
        if done_bytes >= total_bytes:
            self.close()

    def close(self) -> None:
        """Take the bar away, also in the middle of the work. Safe to call again."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()

    def _draw(self, done_bytes: int, total_bytes: int) -> None:
        if self._progress is None:
            self._progress = Progress(
                TextColumn(self._title),
                BarColumn(),
                DownloadColumn(binary_units=True),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._progress.add_task("", total=total_bytes)
            self._progress.start()
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=done_bytes, total=total_bytes, refresh=True)
