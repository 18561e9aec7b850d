"""Makes `examples/trainer.ipynb` of `examples/trainer.py`: ``python -m tests.examples.notebook``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MARK = "# %%"


def cells_of(script: str) -> list[tuple[bool, str]]:
    """Cut a script in the percent format into cells: whether the cell is text, and what is in it.

    Text is written as comments, or as the script's docstring.
    """
    cells = []
    for piece in script.split(MARK)[1:]:
        kind, _, body = piece.partition("\n")
        is_text, body = "[markdown]" in kind, body.strip()
        if is_text:
            lines = [line.removeprefix("# ") for line in body.strip('"').splitlines()]
            body = "\n".join(line.rstrip() for line in lines).strip()
        cells.append((is_text, body))
    return cells


def notebook_of(script: str) -> dict[str, Any]:
    """Return the notebook of a script; a notebook has no ``__file__`` and runs in its own folder."""
    cells: list[dict[str, Any]] = []
    for number, (is_text, body) in enumerate(cells_of(script)):
        body = body.replace('str(Path(__file__).with_name("trainer.yaml"))', '"trainer.yaml"')
        body = body.replace("from pathlib import Path\n", "")
        body = body.replace("    python examples/trainer.py\n\n", "")
        cell = {"cell_type": "markdown" if is_text else "code", "id": f"cell-{number}", "metadata": {}}
        cell["source"] = body.splitlines(keepends=True)
        cells.append(cell if is_text else {**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text_of(notebook: dict[str, Any]) -> str:
    """Return the file's text, as `ruff format` leaves it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    made = notebook_of((EXAMPLES / "trainer.py").read_text(encoding="utf-8"))
    (EXAMPLES / "trainer.ipynb").write_text(text_of(made), encoding="utf-8")
