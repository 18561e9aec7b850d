"""A folder that stands in for the Hub in other projects' tests: tiny models, tokenizers and data sets.

``from_pretrained("trl-internal-testing/tiny-...")`` and ``load_dataset("trl-internal-testing/zen", ...)``
take a folder of that name in the working directory before they ask the Hub. So nothing is patched:
`make_hub_folder` writes the models (random weights, from configurations), a tokenizer and the data sets
under their names, and the tests run in that folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

TRL, PEFT, HF = "trl-internal-testing", "peft-internal-testing", "hf-internal-testing"
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "num_labels": 1,  # of a classifier on top: reward models give one number
}
OLD_SHAPE: dict[str, Any] = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_LLAMA = ("llama", "LlamaForCausalLM", SHAPE | {"num_key_value_heads": 4})
_QWEN2 = ("qwen2", "Qwen2ForCausalLM", SHAPE)
_GPT2 = ("gpt2", "GPT2LMHeadModel", OLD_SHAPE | {"n_inner": 64})
_OPT_SHAPE = SHAPE | {"ffn_dim": 32, "word_embed_proj_dim": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{TRL}/tiny-Qwen2ForCausalLM-2.5": _QWEN2,
    f"{TRL}/tiny-Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM", SHAPE | {"head_dim": 4}),
    f"{TRL}/tiny-Qwen3MoeForCausalLM": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        SHAPE | EXPERTS | {"head_dim": 4, "moe_intermediate_size": 16},
    ),
    f"{TRL}/tiny-GptOssForCausalLM": ("gpt_oss", "GptOssForCausalLM", SHAPE | EXPERTS | {"head_dim": 4}),
    f"{TRL}/tiny-LlamaForCausalLM-3.2": _LLAMA,
    f"{TRL}/tiny-GPTNeoXForCausalLM": ("gpt_neox", "GPTNeoXForCausalLM", SHAPE),
    f"{TRL}/tiny-T5ForConditionalGeneration": (
        "t5",
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    f"{TRL}/tiny-random-LlamaForCausalLM": _LLAMA,
    f"{PEFT}/tiny-dummy-qwen2": _QWEN2,
    f"{PEFT}/tiny-random-OPTForCausalLM": ("opt", "OPTForCausalLM", _OPT_SHAPE),
    f"{PEFT}/opt-125m": ("opt", "OPTForCausalLM", _OPT_SHAPE | {"num_hidden_layers": 12}),
    f"{PEFT}/tiny-random-GPT2LMHeadModel": _GPT2,
    f"{PEFT}/tiny-random-GPTJForCausalLM": ("gptj", "GPTJForCausalLM", OLD_SHAPE | {"rotary_dim": 4}),
    f"{HF}/tiny-random-gpt2": _GPT2,
    f"{HF}/tiny-random-MistralForCausalLM": ("mistral", "MistralForCausalLM", SHAPE),
    f"{HF}/tiny-random-Gemma3ForCausalLM": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        SHAPE | {"head_dim": 4, "sliding_window": 32},
    ),
}
"""Name on the Hub -> model type, class, and what its configuration changes. Vision models are not made."""

TEMPLATES = {"Qwen2": "qwen2_5", "Qwen3": "qwen3", "GptOss": "gptoss", "Llama": "llama3"}
"""Class of a model -> the chat template (a file that TRL brings along) of its tokenizer."""

_PAIRS = [
    ("Beautiful is better than", " ugly.", " the moon."),
    ("Explicit is better than", " implicit.", " silver."),
    ("Simple is better than", " complex.", " a bicycle."),
    ("Complex is better than", " complicated.", " seven."),
    ("Flat is better than", " nested.", " blue."),
    ("Sparse is better than", " dense.", " a river."),
    ("Readability", " counts.", " sleeps."),
    ("Errors should never", " pass silently.", " be painted."),
    ("In the face of ambiguity, refuse", " the temptation to guess.", " the umbrella."),
    ("Now is better than", " never.", " the table."),
    ("If the implementation is hard to explain, it's", " a bad idea.", " a good lamp."),
    ("Namespaces are one honking great", " idea.", " potato."),
]
"""Prompt, right and wrong completion: lines of the Zen of Python."""


def make_hub_folder(folder: Path) -> None:
    """Write all models, tokenizers and data sets."""
    tokenizer = _tokenizer()
    for name, (model_type, class_name, changes) in MODELS.items():
        config = AutoConfig.for_model(
            model_type,
            **{"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
            | {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
            | changes,
        )
        torch.manual_seed(0)
        model = getattr(transformers, class_name)(config)
        model.save_pretrained(folder / name)
        template = next(
            (file for start, file in TEMPLATES.items() if class_name.startswith(start)), "qwen2_5"
        )
        path = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        tokenizer.save_pretrained(folder / name)
    _write_data_set(folder / TRL / "zen", _zen())
    _write_data_set(folder / TRL / "harmony", _harmony())
    quotes = [
        {"quote": ask + right, "author": "Tim Peters", "tags": ["python"]} for ask, right, _ in _PAIRS * 4
    ]
    _write_data_set(folder / "ybelkada" / "english_quotes_copy", {"default": {"train": quotes}})


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on the sentences of the data sets."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ("".join(pair) for pair in _PAIRS),
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<|endoftext|>",
        pad_token="<pad>",
        model_input_names=["input_ids", "attention_mask"],
    )


Rows = list[dict[str, Any]]


def _zen() -> dict[str, dict[str, Rows]]:
    standard: dict[str, Rows] = {
        "language_modeling": [{"text": ask + right} for ask, right, _ in _PAIRS],
        "prompt_only": [{"prompt": ask} for ask, _, _ in _PAIRS],
        "prompt_completion": [{"prompt": ask, "completion": right} for ask, right, _ in _PAIRS],
        "preference": [{"prompt": ask, "chosen": right, "rejected": wrong} for ask, right, wrong in _PAIRS],
        "implicit_prompt_preference": [
            {"chosen": ask + right, "rejected": ask + wrong} for ask, right, wrong in _PAIRS
        ],
        "unpaired_preference": [
            {"prompt": ask, "completion": (wrong, right)[number % 2], "label": bool(number % 2)}
            for number, (ask, right, wrong) in enumerate(_PAIRS)
        ],
    }
    found: dict[str, dict[str, Rows]] = {}
    for kind, rows in standard.items():
        spoken = [_as_conversation(kind, row) for row in rows]
        found[f"standard_{kind}"] = {"train": rows, "test": rows[:4]}
        found[f"conversational_{kind}"] = {"train": spoken, "test": spoken[:4]}
    return found


def _as_conversation(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text.strip()}]

    if kind == "language_modeling":
        return {"messages": said("user", "Go on.") + said("assistant", row["text"])}
    if kind == "implicit_prompt_preference":
        return {key: said("user", "Go on.") + said("assistant", text) for key, text in row.items()}
    return {
        key: said("user" if key == "prompt" else "assistant", value) if isinstance(value, str) else value
        for key, value in row.items()
    }


def _harmony() -> dict[str, dict[str, Rows]]:
    """Conversations with thoughts, as gpt-oss writes them."""
    rows: Rows = []
    for ask, right, wrong in _PAIRS:
        user = {"role": "user", "content": ask, "thinking": ""}
        answer = {"role": "assistant", "content": right.strip(), "thinking": f"Not{wrong}"}
        extra = {"reasoning_effort": "low", "model_identity": "You are Tiny."}
        rows.append({"prompt": [user], "completion": [answer], "messages": [user, answer], **extra})
    whole = [{key: row[key] for key in row if key not in ("prompt", "completion")} for row in rows]
    parts = [{key: row[key] for key in row if key != "messages"} for row in rows]
    return {"language_modeling": {"train": whole}, "prompt_completion": {"train": parts}}


def _write_data_set(folder: Path, configurations: dict[str, dict[str, Rows]]) -> None:
    """Write JSON lines for each configuration and split, and the README that names them."""
    lines = ["---", "configs:"]
    for name, splits in configurations.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, rows in splits.items():
            path = folder / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            lines += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
