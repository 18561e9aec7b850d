"""Trains inside fine-tuning tools with and without a plan: losses and weights must be the same bits.

    python tests/tools/run.py                                # every tool: SFT and DPO, one process and two
    python tests/tools/run.py --tools swift --kinds dpo --processes 2
    python tests/tools/run.py --environments FOLDER          # where the tools are installed, or will be

Each tool is installed by its own pins (`install`), and started by its own command line on the CPU, on a Llama
of two layers and data that are made here. With a plan it is started in each way that docs/beside/ names:
``hf-actswap run --`` before the command, and one line of the tool's own configuration where it has one. A
training counts if it ends without a plan. With one the losses of all steps and the weights at the end must be
the same bits, the plan must have been in effect (bytes moved and computed again), and the console must have
its lines. The exit status is 1 if not. A table of what was run is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from install import TOOLS, install
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

STEPS = 10
PLAN = {
    "swap_config": {
        "swap": True,
        "op_swap": [{"op_name": "attention", "backward_prefetch": 20, "layers": True}],
    },
    "recompute_config": {"select_recompute": {"feed_forward": True}},
    "memory": {"min_tensor_mib": 0.0001},
}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}


# What is trained.


def text(start: int, words: int) -> str:
    return " ".join(f"word{(start + 3 * number) % 40}" for number in range(words))


def make_model(folder: Path, family: str) -> None:
    """Write a model with random weights and a tokenizer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    bpe.train_from_iterator([text(start, 30) for start in range(40)], trainer)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT, **names)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config, model = FAMILIES[family]
    shape = config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model(shape).save_pretrained(folder)
    # Tools of different age read it: the words for the class and the type are those that all know.
    file = folder / "tokenizer_config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "tokenizer_class": "PreTrainedTokenizerFast"}))


def write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_data(folder: Path) -> None:
    """Write the same conversations and preferences in the forms of the tools."""
    asked = [(text(number, 6), text(number + 1, 9 + number % 5), text(number + 7, 8)) for number in range(64)]

    def said(question: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    write_lines(folder / "sft.jsonl", [{"messages": said(ask, good)} for ask, good, _ in asked])
    write_lines(
        folder / "dpo.jsonl",
        [{"messages": said(ask, good), "rejected_response": bad} for ask, good, bad in asked],
    )
    write_lines(
        folder / "pairs.jsonl",
        [{"prompt": ask, "chosen": good, "rejected": bad} for ask, good, bad in asked],
    )
    alpaca = [{"instruction": ask, "input": "", "output": good} for ask, good, _ in asked]
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    ranked = [{"instruction": ask, "chosen": good, "rejected": bad} for ask, good, bad in asked]
    (folder / "ranked.json").write_text(json.dumps(ranked))
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    about = {
        "sft": {"file_name": "alpaca.json"},
        "dpo": {"file_name": "ranked.json", "ranking": True, "columns": columns},
    }
    (folder / "dataset_info.json").write_text(json.dumps(about))


# How each tool is started.


@dataclass(frozen=True)
class Training:
    """One training: the tool's command, the variables of its environment, and how many processes train."""

    command: list[str]
    variables: dict[str, str]
    processes: int


@dataclass(frozen=True)
class Case:
    """What is trained, and where."""

    work: Path
    out: Path
    kind: str
    processes: int
    lora: bool = False
    family: str = "llama"

    def file(self, name: str, text: str) -> str:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / name).write_text(text)
        return str(self.out / name)


def llamafactory(case: Case, line: str | None) -> Training:
    assert line is None
    settings = {
        "model_name_or_path": str(case.work / "model"),
        "stage": case.kind,
        "do_train": True,
        "finetuning_type": "lora" if case.lora else "full",
        "dataset": case.kind,
        "dataset_dir": str(case.work),
        "template": "qwen",
        "cutoff_len": 128,
        "output_dir": str(case.out),
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": STEPS,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": True,
        "overwrite_cache": True,
    }
    several = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(case.processes)} if case.processes > 1 else {}
    file = case.file("train.yaml", yaml.safe_dump(settings))
    return Training(["llamafactory-cli", "train", file], several, case.processes)


def swift(case: Case, line: str | None) -> Training:
    words = {
        "model": str(case.work / "model"),
        "model_type": case.family,
        "template": "chatml",
        "tuner_type": "lora" if case.lora else "full",
        "dataset": str(case.work / f"{case.kind}.jsonl"),
        "output_dir": str(case.out),
        "add_version": "false",
        "torch_dtype": "float32",
        "max_length": "128",
        "per_device_train_batch_size": "2",
        "max_steps": str(STEPS),
        "logging_steps": "1",
        "save_steps": str(STEPS),
        "learning_rate": "1e-3",
        "report_to": "none",
        "use_cpu": "true",
        "split_dataset_ratio": "0",
        "dataset_num_proc": "1",
        **({"rlhf_type": "dpo"} if case.kind == "dpo" else {}),
    }
    command = ["swift", "rlhf" if case.kind == "dpo" else "sft"]
    command += [word for key, value in words.items() for word in (f"--{key}", value)]
    several = {"NPROC_PER_NODE": str(case.processes)} if case.processes > 1 else {}
    assert line is None
    return Training(command, several, case.processes)


def axolotl(case: Case, line: str | None) -> Training:
    preferences = {
        "path": str(case.work / "pairs.jsonl"),
        "ds_type": "json",
        "split": "train",
        "type": {
            "field_prompt": "prompt",
            "field_chosen": "chosen",
            "field_rejected": "rejected",
            "prompt_format": "{prompt}",
            "chosen_format": "{chosen}",
            "rejected_format": "{rejected}",
        },
    }
    chats = {"path": str(case.work / "sft.jsonl"), "ds_type": "json", "type": "chat_template"}
    settings: dict[str, Any] = {
        "base_model": str(case.work / "model"),
        "datasets": [preferences if case.kind == "dpo" else chats],
        "dataset_prepared_path": str(case.out / "prepared"),
        "output_dir": str(case.out),
        "sequence_len": 128,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "num_epochs": 1,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "lr_scheduler": "cosine",
        "logging_steps": 1,
        "save_steps": STEPS,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "use_cpu": True,
        "attn_implementation": "sdpa",
        "dataset_num_proc": 1,
        "seed": 3,
        **({"rl": "dpo"} if case.kind == "dpo" else {"chat_template": "tokenizer_default"}),
        **(
            {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True} if case.lora else {}
        ),
    }
    if line is not None:
        settings |= {"plugins": ["hf_actswap.integrations.axolotl.ActSwapPlugin"], "actswap": line}
    command = ["axolotl", "train", case.file("train.yaml", yaml.safe_dump(settings))]
    several = ["--launcher", "accelerate", "--", "--num_processes", str(case.processes), "--cpu"]
    return Training(command + several, {"AXOLOTL_DO_NOT_TRACK": "1"}, case.processes)


COMMANDS: dict[str, Callable[[Case, str | None], Training]] = {
    "llamafactory": llamafactory,
    "swift": swift,
    "axolotl": axolotl,
}
OWN_LINE = ("axolotl",)
"""Tools that have a line of their own configuration for a plan."""


# One training, and what it left.


@dataclass(frozen=True)
class Result:
    """What a training left: losses step by step, weights by name, and its console."""

    code: int
    losses: list[float]
    weights: dict[str, torch.Tensor]
    console: str


def start(training: Training, python: Path, case: Case, before: Sequence[str]) -> Result:
    """Run a training in a tool's environment, and read what it left."""
    tools = str(python.parent)
    environment = {
        **{
            name: value for name, value in os.environ.items() if not name.startswith(("HF_ACTSWAP", "PYTHON"))
        },
        "PATH": os.pathsep.join((tools, os.environ["PATH"])),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(case.work / "cache"),
        "MODELSCOPE_CACHE": str(case.work / "modelscope"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
        **training.variables,
    }
    case.out.mkdir(parents=True, exist_ok=True)
    ran = subprocess.run(
        [*before, *training.command],
        env=environment,
        cwd=case.work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    (case.out / "console.txt").write_text(ran.stdout)
    return Result(ran.returncode, *left_by(case.out), ran.stdout)


def left_by(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the weights of the last checkpoint in a folder."""
    states = sorted(folder.glob(f"**/checkpoint-{STEPS}/trainer_state.json"))
    if not states:
        return [], {}
    history = json.loads(states[-1].read_text())["log_history"]
    files = sorted(states[-1].parent.glob("*.safetensors"))
    weights = {key: value for file in files for key, value in load_file(file).items()}
    return [entry["loss"] for entry in history if "loss" in entry], weights


def wrong_with(result: Result, plain: Result, by_run: bool) -> list[str]:
    """Return what is not as it should be in a training with a plan."""
    found = [f"exit status {result.code}"] if result.code else []
    if result.losses != plain.losses:
        found.append(f"losses {result.losses} in place of {plain.losses}")
    absent = torch.empty(0)
    differing = [
        key for key, value in plain.weights.items() if not torch.equal(value, result.weights.get(key, absent))
    ]
    if not plain.weights or differing:
        found.append(f"{len(differing)} of {len(plain.weights)} weights differ")
    said = re.findall(r"A step moves (\S+) GiB to host memory and computes (\S+) GiB again", result.console)
    if len(said) != 1 or not all(float(number) > 0 for number in said[0]):
        found.append(f"bytes moved and computed again: {said}")
    lines = ["Activation plan, 2 ", "without a plan (counted"]
    if by_run:
        lines.append("was trained with a plan: a step moved")
    found += [f"no line {line!r}" for line in lines if result.console.count(line) != 1]
    return found


def run_case(name: str, python: Path, case: Case) -> list[tuple[str, list[str]]]:
    """Train without a plan and in each way with one; return the ways and what was wrong with each."""
    make, folder = COMMANDS[name], case.out
    shutil.rmtree(folder, ignore_errors=True)

    def trained(way: str, line: str | None, before: Sequence[str] = ()) -> Result:
        of_way = Case(case.work, folder / way, case.kind, case.processes, case.lora, case.family)
        return start(make(of_way, line), python, of_way, before)

    plan = str(case.work / "actswap.yaml")
    plain = trained("plain", None)
    if plain.code or len(plain.losses) != STEPS:
        return [("without a plan", [f"exit status {plain.code}, losses {plain.losses}"])]
    run = trained("run", None, ("hf-actswap", "run", "--actswap", plan, "--"))
    ways = [("hf-actswap run", wrong_with(run, plain, by_run=True))]
    if name in OWN_LINE:
        own = trained("own", plan)
        ways.append(("its own configuration", wrong_with(own, plain, by_run=False)))
    return ways


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--kinds", nargs="+", choices=("sft", "dpo"), default=["sft", "dpo"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--family", choices=("llama", "qwen2"), default="llama")
    parser.add_argument("--lora", action="store_true", help="adapters in place of all weights")
    parser.add_argument("--environments", type=Path, default=Path(".venv-tools"))
    parser.add_argument("--work", type=Path, default=Path(".venv-tools/work"))
    asked = parser.parse_args()
    work = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    make_model(work / "model", asked.family)
    make_data(work)
    (work / "actswap.yaml").write_text(yaml.safe_dump(PLAN))
    failed = 0
    for name in asked.tools:
        python = install(TOOLS[name], asked.environments.resolve() / name)
        for kind in asked.kinds:
            for processes in asked.processes:
                case = Case(
                    work,
                    work / "out" / f"{name}-{kind}-{processes}",
                    kind,
                    processes,
                    asked.lora,
                    asked.family,
                )
                for way, wrong in run_case(name, python, case):
                    failed += bool(wrong)
                    verdict = "; ".join(wrong) or "the same bits, plan in effect"
                    print(f"| {TOOLS[name].package} | {kind} | {processes} | {way} | {verdict} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
