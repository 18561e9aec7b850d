"""Will it fit, in a browser: `hf-actswap plan` as a small Gradio app, for a Space of the Hub or at home.

    python examples/space/app.py  # pip install 'hf-actswap[space]'

It needs no GPU and no weights. A model is a Hub id, or the text of a `config.json`, which needs no network.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gradio as gr
from answers import GPUS, METHODS, PLAN_FILE, answer


def page(folder: Path) -> gr.Blocks:
    """Return the page; ``folder`` holds the files of the one question that is being answered."""
    with gr.Blocks(title="Will it fit?", analytics_enabled=False) as made:
        gr.Markdown("# Will it fit?\nA training on one GPU, with activations kept, swapped and recomputed.")
        with gr.Row():
            with gr.Column():
                model = gr.Textbox(
                    label="Model: its Hub id, or the text of its config.json", lines=8, max_lines=8
                )
                upload = gr.UploadButton("Upload config.json", file_types=[".json"], size="sm")
            with gr.Column():
                gpu = gr.Dropdown(GPUS, value=GPUS[0], label="GPU")
                method = gr.Radio(list(METHODS), value="full", label="Method")
                with gr.Row():
                    rank = gr.Number(16, label="LoRA rank", precision=0, minimum=1, min_width=80)
                    seq = gr.Textbox("4096", label="Sequence", max_lines=1, min_width=80)
                    batch = gr.Number(1, label="Batch", precision=0, minimum=1, min_width=80)
                    budget = gr.Textbox(label="Budget", placeholder="all, or 40GB", max_lines=1, min_width=80)
                ask = gr.Button("Will it fit?", variant="primary")
        verdict = gr.Markdown(elem_id="verdict")
        with gr.Column(visible=False) as planned:
            table = gr.Markdown(elem_id="table")
            picture = gr.Plot(show_label=False, elem_id="picture")
            configuration = gr.Code(label="To copy", language="yaml", elem_id="configuration")
            plan_file = gr.DownloadButton(f"Download {PLAN_FILE}", elem_id="plan")
        notes = gr.Textbox(show_label=False, container=False, interactive=False, elem_id="notes")

        def asked(*inputs: Any) -> tuple[Any, ...]:
            shown = answer(folder, *inputs)
            download = gr.update(value=shown.plan_file, visible=shown.plan_file is not None)
            parts = gr.update(visible=bool(shown.table)), shown.table, shown.picture, shown.configuration
            return f"## {shown.verdict}", *parts, download, shown.notes

        upload.upload(lambda path: Path(path).read_text(encoding="utf-8", errors="replace"), upload, model)
        inputs = [model, gpu, method, rank, seq, batch, budget]
        ask.click(asked, inputs, [verdict, planned, table, picture, configuration, plan_file, notes])
    return made


def main() -> None:
    """Serve the page, at the first free port from 7860 on, or at ``GRADIO_SERVER_PORT``."""
    with tempfile.TemporaryDirectory() as folder:
        page(Path(folder)).launch()


if __name__ == "__main__":
    main()
