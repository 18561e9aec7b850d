"""``python -m hf_actswap.cli``."""

from __future__ import annotations

from .app import app

if __name__ == "__main__":
    app(prog_name="hf-actswap")
