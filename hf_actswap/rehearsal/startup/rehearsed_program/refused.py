"""What a rehearsal cannot run says so by name, and NCCL is replaced by gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_BITSANDBYTES = (
    "a rehearsal cannot run bitsandbytes: its kernels are not PyTorch's, and the memory of its weights and "
    'states cannot be seen. Leave it out (quantization_config, optim="adamw_torch"), or ask '
    "`hf-actswap plan --lora r=16 --quantize 4bit`, which knows its sizes."
)
_COMPILATION = (
    "a rehearsal cannot run torch.compile: its kernels need a GPU to be loaded. Leave compilation out "
    "(torch_compile=False); memory and order are rehearsed eagerly."
)


def refuse_bitsandbytes(_: ModuleType) -> None:
    """Raise: the package ``bitsandbytes`` was imported."""
    raise ImportError(_BITSANDBYTES)


def refuse_its_config(configs: ModuleType) -> None:
    """Let ``BitsAndBytesConfig`` raise an error when one is made.

    Args:
        configs: ``transformers.utils.quantization_config``.
    """

    def refused(self: Any, *arguments: Any, **options: Any) -> None:
        raise RuntimeError(_BITSANDBYTES)

    configs.BitsAndBytesConfig.__init__ = refused


def refuse_compilation(torch: Any) -> None:
    """Let what is compiled say by name that a rehearsal runs eagerly, when it is called."""

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda found: compile(found, **options)
        if isinstance(model, torch.nn.Module):
            raise RuntimeError(_COMPILATION)
        if options.get("backend") not in (None, "inductor"):
            return original(model, **options)

        def refused(*arguments: Any, **keywords: Any) -> Any:
            raise RuntimeError(_COMPILATION)

        return refused

    def compile_module(self: Any, *arguments: Any, **options: Any) -> None:
        raise RuntimeError(_COMPILATION)

    original, torch.compile = torch.compile, compile
    torch.nn.Module.compile = compile_module


def replace_nccl(distributed: Any) -> None:
    """Let process groups that ask for NCCL use gloo, which has the same collectives.

    Args:
        distributed: ``torch.distributed``, or the module in it that has the functions.
    """
    said: list[str] = []

    def with_gloo(original: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            asked = arguments[place] if len(arguments) > place else options.get("backend")
            if asked is None or "nccl" in str(asked):
                if not said and os.environ.get("RANK", "0") == "0":
                    said.append("gloo")
                    sys.stderr.write("rehearsal: ranks talk through gloo: NCCL needs GPUs\n")
                if len(arguments) > place:
                    arguments = (*arguments[:place], "gloo", *arguments[place + 1 :])
                else:
                    options["backend"] = "gloo"
                options.pop("device_id", None)
                options.pop("pg_options", None)
            return original(*arguments, **options)

        return call

    distributed.init_process_group = with_gloo(distributed.init_process_group, 0)
    distributed.new_group = with_gloo(distributed.new_group, 2)
