"""Makes `examples/trainer.ipynb` of `examples/trainer.py`: ``python -m tests.examples.notebook``.

It runs it, so that the outputs are in it, for which ``pip install nbclient ipykernel`` is needed once.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from tests.docs.pages import script as docs_script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MARK = "# %%"
INSTALL = """from importlib.util import find_spec

if find_spec("hf_actswap") is None:  # on Colab, say
    %pip install --quiet git+{url}"""


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


def notebook_of(script: str, settings: str) -> dict[str, Any]:
    """Return the notebook of a script, not run. No file is beside a notebook on Colab: its cells hold all.

    Args:
        script: in the percent format, its text first.
        settings: the YAML that the script reads from a file.
    """
    head, *pieces = cells_of(script)
    settings = re.sub(r"\A# yaml-language-server: .*\n", "", settings)  # the schema is not beside it either
    install = INSTALL.format(url=docs_script("site_links").repository_url())
    cells: list[dict[str, Any]] = []
    for number, (is_text, body) in enumerate([head, (False, install), *pieces]):
        body = body.replace('str(Path(__file__).with_name("trainer.yaml"))', f'"""\n{settings}"""')
        body = body.replace("from pathlib import Path\n", "")
        body = body.replace("    python examples/trainer.py\n\n", "").replace("`trainer.yaml`", "`CONFIG`")
        cell = {"cell_type": "markdown" if is_text else "code", "id": f"cell-{number}", "metadata": {}}
        cell["source"] = body.splitlines(keepends=True)
        cells.append(cell if is_text else {**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def with_outputs(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run a notebook, and return it with what its cells showed."""
    import nbclient
    import nbformat

    ran = nbformat.reads(text_of(notebook), as_version=4)
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}  # those of libraries name folders of this machine
    nbclient.NotebookClient(ran, timeout=300, record_timing=False).execute(env=quiet)
    shown = [{key: cell[key] for key in ("execution_count", "outputs") if key in cell} for cell in ran.cells]
    cells = [{**cell, **outputs} for cell, outputs in zip(notebook["cells"], shown, strict=True)]
    for output in (output for cell in cells for output in cell.get("outputs", ())):
        if isinstance(output.get("text"), str):  # in lines, which a difference can be read in
            output["text"] = output["text"].splitlines(keepends=True)
    return {**notebook, "cells": cells}


def without_outputs(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook as if it was not run."""
    blank = {"execution_count": None, "outputs": []}
    cells = [{**cell, **blank} if cell["cell_type"] == "code" else cell for cell in notebook["cells"]]
    return {**notebook, "cells": cells}


def text_of(notebook: dict[str, Any]) -> str:
    """Return the file's text, as `ruff format` leaves it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def made() -> dict[str, Any]:
    """Return the notebook of the example, not run."""
    return notebook_of(*((EXAMPLES / f"trainer.{end}").read_text(encoding="utf-8") for end in ("py", "yaml")))


if __name__ == "__main__":
    (EXAMPLES / "trainer.ipynb").write_text(text_of(with_outputs(made())), encoding="utf-8")
