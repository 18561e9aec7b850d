"""The version, alone in a module so that the build reads it without importing torch."""

from __future__ import annotations

__version__ = "0.1.0"
