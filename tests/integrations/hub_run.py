"""Started by `accelerate launch` on two CPU processes: what each of them reads from the Hub."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from transformers import Trainer

from hf_actswap import ActSwapCallback, ActSwapTrainingArguments, ConfigError
from tests.integrations.conftest import Tokens, tiny_llama


def arguments(folder: str, actswap: str) -> ActSwapTrainingArguments:
    return ActSwapTrainingArguments(
        output_dir=folder,
        actswap=actswap,
        max_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="steps",
        save_steps=1,
        save_only_model=True,
        use_cpu=True,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )


def main(result: str) -> None:
    rank = int(os.environ["RANK"])
    folder = str(Path(result).parent / "out")
    args = arguments(folder, "org/name@main")
    trainer = Trainer(
        model=tiny_llama(), args=args, train_dataset=Tokens(), callbacks=[ActSwapCallback(args)]
    )
    trainer.train()
    try:
        arguments(folder, "org/nothing")
        error = ""
    except ConfigError as caught:
        error = str(caught)
    found = {
        "actswap": args.actswap,
        "swap": args.actswap_config().swap_config.swap,
        "log": Path(folder, f"worker_{rank}.log").read_text(),
        "error": error,
    }
    Path(f"{result}.{rank}").write_text(json.dumps(found))


main(sys.argv[1])
