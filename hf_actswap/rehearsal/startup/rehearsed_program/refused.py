"""What a rehearsal cannot run says so by name."""

from __future__ import annotations

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
