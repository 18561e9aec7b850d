"""What a rehearsal cannot run says so by name."""

from __future__ import annotations

from typing import Any

_COMPILATION = (
    "a rehearsal cannot run torch.compile: its kernels need a GPU to be loaded. Leave compilation out "
    "(torch_compile=False); memory and order are rehearsed eagerly."
)


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
