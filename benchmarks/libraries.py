"""Rehearses trainings with the models of other libraries: gradient checkpointing beside ``auto``.

    python benchmarks/libraries.py [--only NAME ...] [--out FILE]

It needs diffusers and sentence-transformers, and the environment of ``make rehearse``. The loops of
diffusers' models have no line of this package: ``hf-actswap run`` gives them the plan. Weights are random,
memory is that of PyTorch's allocator, times are those of the rehearsed clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.promise import HOST_MEMORY, ROOT, seen

WAYS = ("checkpointing", "auto")
STEPS = 8
TOKENS = 512


@dataclass(frozen=True)
class Row:
    """A training: ``kind`` is a name of `KINDS`, ``size`` its batch."""

    kind: str
    device: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.device}, {self.size}"


ROWS = (
    Row("flux", "A100-80", 4),
    Row("sdxl", "RTX 4090", 4),
    Row("pairs", "RTX 4090", 64),
    Row("pairs", "RTX 4090", 128),
    Row("cached pairs", "RTX 4090", 512),
)


def train_flux(how: str, batch: int) -> None:
    """FLUX.1-dev, LoRA of rank 16 on attention, images of 1,024 x 1,024 pixels, 512 tokens of text."""
    import torch
    from diffusers import FluxTransformer2DModel

    with torch.device("cuda"):
        model = FluxTransformer2DModel(guidance_embeds=True)

    def batch_of() -> dict[str, Any]:
        sizes = {
            "hidden_states": (4096, 64),
            "encoder_hidden_states": (512, 4096),
            "pooled_projections": (768,),
        }
        found = {name: torch.randn(batch, *size, device="cuda") for name, size in sizes.items()}
        found |= {name: torch.rand(batch, device="cuda") for name in ("timestep", "guidance")}
        return {**found, "txt_ids": torch.zeros(512, 3).cuda(), "img_ids": torch.zeros(4096, 3).cuda()}

    _loop(model, how, batch_of)


def train_sdxl(how: str, batch: int) -> None:
    """SDXL's UNet, LoRA of rank 16 on attention, images of 1,024 x 1,024 pixels."""
    import torch
    from diffusers import UNet2DConditionModel

    down = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    up = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    sizes = {"block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10)}
    times = {"addition_embed_type": "text_time", "addition_time_embed_dim": 256, "cross_attention_dim": 2048}
    with torch.device("cuda"):
        model = UNet2DConditionModel(
            down_block_types=down,
            up_block_types=up,
            attention_head_dim=(5, 10, 20),
            use_linear_projection=True,
            projection_class_embeddings_input_dim=2816,
            **sizes,
            **times,
        )

    def batch_of() -> dict[str, Any]:
        added = {"time_ids": torch.zeros(batch, 6).cuda(), "text_embeds": torch.randn(batch, 1280).cuda()}
        text, steps = torch.randn(batch, 77, 2048).cuda(), torch.randint(0, 1000, (batch,)).cuda()
        given = {"encoder_hidden_states": text, "added_cond_kwargs": added, "timestep": steps}
        return {"sample": torch.randn(batch, 4, 128, 128, device="cuda"), **given}

    _loop(model, how, batch_of)


def _loop(model: Any, how: str, batch_of: Callable[[], dict[str, Any]]) -> None:
    """Train as diffusers' scripts do, which know nothing of this package."""
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig

    model = model.to(torch.bfloat16).requires_grad_(False)
    model.add_adapter(LoraConfig(r=16, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    if how == "checkpointing":
        model.enable_gradient_checkpointing()
    accelerator = Accelerator(mixed_precision="bf16")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-4, fused=True))
    for _ in range(STEPS):
        result = model(**batch_of(), return_dict=False)[0]
        accelerator.backward(result.float().pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()


def train_pairs(how: str, batch: int, cached: bool = False) -> None:
    """Qwen3-Embedding-0.6B, all weights, pairs of 512 tokens; ``cached``: in mini-batches of 128 pairs."""
    import torch
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

    from hf_actswap import with_actswap

    words = Tokenizer(models.WordLevel({"<pad>": 0, "word": 1}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", model_max_length=TOKENS)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "use_cache": False}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936}
    with tempfile.TemporaryDirectory() as folder:
        tiny = Qwen3Config(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8, head_dim=8
        )
        Qwen3Model(tiny).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        encoder = Transformer(folder)
    with torch.device("cuda"):
        encoder.model = AutoModel.from_config(Qwen3Config(**sizes), dtype=torch.bfloat16)
    model = SentenceTransformer(modules=[encoder, Pooling(1024)], device="cuda")
    text = " ".join(["word"] * TOKENS)
    data = Dataset.from_dict({name: [text] * (batch * STEPS) for name in ("anchor", "positive")})
    given = {"output_dir": tempfile.gettempdir(), "per_device_train_batch_size": batch, "max_steps": STEPS}
    given |= {"report_to": "none", "save_strategy": "no", "bf16": True, "optim": "adamw_torch_fused"}
    auto, again = with_actswap(Arguments), how == "checkpointing"
    args = Arguments(**given, gradient_checkpointing=True) if again else auto(**given, actswap="auto")
    loss: Any = losses.MultipleNegativesRankingLoss(model)
    if cached:
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=batch // 4)
    SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss).train()


KINDS: dict[str, Callable[[str, int], None]] = {
    "flux": train_flux,
    "sdxl": train_sdxl,
    "pairs": train_pairs,
    "cached pairs": lambda how, batch: train_pairs(how, batch, cached=True),
}


def rehearsed(row: Row, how: str, folder: Path) -> dict[str, Any]:
    """Train a row as ``how`` says on its rehearsed device; return what was seen."""
    report = folder / "report.json"
    ours = [sys.executable, "-m", "hf_actswap.cli"]
    command = [sys.executable, __file__, "--train", row.kind, how, str(row.size)]
    if how == "auto" and "pairs" not in row.kind:
        command = [*ours, "run", "--actswap", "auto", "--", *command]
    asked = ["--device", row.device, "--clock", "--host-memory", HOST_MEMORY, "--no-weights", "--no-advice"]
    command = [*ours, "rehearse", *asked, "--report", str(report), "--", *command]
    path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if not report.exists():
        raise SystemExit((ran.stdout + ran.stderr)[-8000:])
    return seen(json.loads(report.read_text("utf-8")), ran.stdout + ran.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", default=list(KINDS), choices=list(KINDS), help="rows to rehearse"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write; other rows in it stay")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        kind, how, size = given.train
        KINDS[kind](how, int(size))
        return
    kept = json.loads(given.out.read_text("utf-8")) if given.out and given.out.exists() else {}
    for row in ROWS:
        if row.kind in given.only:
            with tempfile.TemporaryDirectory() as folder:
                kept[row.name] = {how: rehearsed(row, how, Path(folder)) for how in WAYS}
            print(row.name, json.dumps(kept[row.name]), flush=True)
            if given.out:
                given.out.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
