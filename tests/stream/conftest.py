"""As for the engine: one thread."""

from __future__ import annotations

from tests.engine.conftest import _one_thread as _one_thread
