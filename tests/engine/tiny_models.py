"""Tiny models, the plans that the tests put on them, and the training loop that all of them run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaForCausalLM

from hf_actswap import MemoryPlan, apply, load_config, model_structure
from hf_actswap.config import ActSwapConfig
from hf_actswap.engine import AppliedPlan, SwapStats, Transfer
from hf_actswap.plan import PlanRow, Windows

VOCABULARY = 64
NUM_LAYERS = 4
BATCH, LENGTH = 2, 16
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "experts_implementation": "eager"}

_HEAD = 'context: {memory_optimize_level: "O0"}\nmodel: {model_config: {num_layers: 4}}\n'
_OPS = """\
swap_config:
  swap: True
  op_swap:
    - op_name: 'attention'
      backward_prefetch: 20
      layers: [0,1,2]
    - op_name: 'attention'
      backward_prefetch: 10
      layers: [3]
    - op_name: 'feed_forward'
      backward_prefetch: 15
      layers: [1,2]
"""

CASES: dict[str, str] = {
    "default_swap": _HEAD + "swap_config: {swap: True, default_prefetch: 10}\n",
    "case_2": _HEAD + "swap_config: {swap: True, layer_swap: [{backward_prefetch: 20, layers: [0,3]}]}\n",
    "case_3": _HEAD + _OPS,
    "case_4": _HEAD + "recompute_config: {select_recompute: {'feed_forward': [0,3]}}\n" + _OPS,
    "full_recompute": _HEAD + "recompute_config: {recompute: True}\n",
    "select_recompute": _HEAD + "recompute_config: {select_recompute: True}\n",
    "exclude_inside_full": _HEAD + "recompute_config: {recompute: True, select_recompute_exclude: "
    "['feed_forward.w1.activation.silu', 'attention.flash_attention']}\n",
}
"""The documents' cases for a model of four layers, and the recomputations beside them."""

SWAP_CASES = ("default_swap", "case_2", "case_3", "case_4")


def tiny(family: str, **settings: Any) -> nn.Module:
    """Return a model of 4 layers, hidden 32, 4 heads over 2 key-value heads, in training mode.

    Args:
        family: one that has Llama's names for its sizes, as in the name of its configuration's class.
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": settings.get("hidden_size", 32) // settings.get("num_attention_heads", 4),
    }
    torch.manual_seed(settings.pop("seed", 0))
    config = getattr(transformers, f"{family}Config")(**{**shape, **settings})
    return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).train()


def tiny_llama(dtype: torch.dtype = torch.float32, **settings: Any) -> LlamaForCausalLM:
    """Return a `tiny` Llama."""
    return tiny("Llama", **settings).to(dtype)


def tiny_mixtral() -> nn.Module:
    """Return a `tiny` Mixtral with 8 experts of which each token takes 2."""
    return tiny("Mixtral", **EXPERTS, num_local_experts=8)


def tiny_neox(dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> GPTNeoXForCausalLM:
    """Return a GPT-NeoX of 4 layers with all of its dropouts on, in training mode."""
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        hidden_dropout=0.2,
        attention_dropout=0.1,
        **settings,
    )
    return GPTNeoXForCausalLM(config).to(dtype).train()


def compiled_layers(model: nn.Module, wrapped: bool = False, **options: Any) -> nn.Module:
    """Compile each decoder layer: in place, or ``wrapped`` by what ``torch.compile`` returns."""
    model.config.use_cache = False  # a plan does so too; a cache makes every layer another graph
    structured = model_structure(model).layers
    stack = model.get_submodule(structured[0].module_path.rpartition(".")[0])
    for index, layer in enumerate(list(stack)):
        if wrapped:
            stack[index] = torch.compile(layer, **options)
        else:
            layer.compile(**options)
    return model


def swap_rows(paths: Iterable[str], layers: Iterable[int], prefetch_ops: int = 10) -> tuple[PlanRow, ...]:
    """Return rows that swap these op paths in these layers."""
    windows = Windows.of_prefetch(prefetch_ops)
    paths = tuple(paths)
    return tuple(PlanRow(layer, path, "swap", windows=windows) for layer in layers for path in paths)


def recompute_rows(paths: Iterable[str], layers: Iterable[int]) -> tuple[PlanRow, ...]:
    """Return rows that recompute these op paths in these layers."""
    paths = tuple(paths)
    return tuple(PlanRow(layer, path, "recompute") for layer in layers for path in paths)


def plan_of(*rows: PlanRow, num_layers: int = NUM_LAYERS, **settings: Any) -> MemoryPlan:
    """Return a plan without a size threshold."""
    return MemoryPlan(rows=rows, num_layers=num_layers, **{"min_tensor_bytes": 0, **settings})


def swap_everything(prefetch_ops: int = 10, **settings: Any) -> MemoryPlan:
    """Return the plan that swaps all that may be swapped, around the layers too."""
    windows = Windows.of_prefetch(prefetch_ops)
    wrap_call = tuple(
        PlanRow(scope, "", "swap", windows=windows) for scope in ("embedding", "final_norm", "head")
    )
    return plan_of(*swap_rows([""], range(NUM_LAYERS), prefetch_ops), *wrap_call, **settings)


_LAYERS = range(NUM_LAYERS)
PLANS: dict[str, MemoryPlan] = {
    "everything swapped": swap_everything(5),
    "fetched on use": swap_everything(0),
    "fetched at once": swap_everything(1000),
    "mlp swapped": plan_of(*swap_rows(["mlp"], _LAYERS, 5)),
    "mlp recomputed": plan_of(*recompute_rows(["mlp"], _LAYERS), *swap_rows(["self_attn"], _LAYERS, 5)),
    "layers recomputed": plan_of(*recompute_rows([""], _LAYERS), *swap_rows(["output"], _LAYERS, 5)),
}
"""What is put on models with kernels, layers or weights of others: the ways to hold a tensor."""


def plans(*names: str) -> dict[str, MemoryPlan]:
    """Return some of `PLANS` by name."""
    return {name: PLANS[name] for name in names}


def batch(step: int) -> torch.Tensor:
    """Return token ids of one step, int64, shape (2, 16)."""
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step))


def forward(model: nn.Module, step: int = 0) -> torch.Tensor:
    """Return the loss of one batch."""
    ids = batch(step)
    return model(input_ids=ids, labels=ids).loss


def one_step(model: nn.Module, step: int = 0) -> torch.Tensor:
    """Run forward and backward of one batch; return the loss."""
    loss = forward(model, step)
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all gradients by parameter name."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gradients_of_step(model: nn.Module, step: int = 0) -> dict[str, torch.Tensor]:
    """Return the gradients of one batch alone."""
    model.zero_grad()
    one_step(model, step)
    return gradients(model)


@dataclass
class Run:
    """What a training run left behind; ``grads`` per optimizer step, ``stats`` after each."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    stats: list[SwapStats] = field(default_factory=list)
    layer_runs: int = 0


def train(
    model: nn.Module,
    plan: MemoryPlan | str | None,
    steps: int = 20,
    accumulation: int = 1,
    autocast: torch.dtype | None = None,
    transfer: Transfer | None = None,
) -> Run:
    """Train with AdamW under a plan (``None``: untouched) and take it off again."""
    run = Run()
    applied = on(model, plan, transfer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    projection = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
    counting = next(projection.children()).register_forward_hook(lambda *_: _count(run))
    torch.manual_seed(7)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulation):
            context: AbstractContextManager[Any] = (
                torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
            )
            with context:
                loss = forward(model, step * accumulation + part)
            (loss / accumulation).backward()
            run.losses.append(loss.item())
        run.grads.append(gradients(model))
        optimizer.step()
        if applied is not None:
            run.stats.append(applied.stats())
    counting.remove()
    if applied is not None:
        applied.remove()
    return run


def on(
    model: nn.Module,
    plan: MemoryPlan | str | None,
    transfer: Transfer | None = None,
    verify: bool = True,
) -> AppliedPlan | None:
    """Put a plan or a YAML text on a model; ``None``: leave it alone.

    Without ``verify`` the first step is like the others: it has no checksums, which are ops and bytes too.
    """
    if plan is None:
        return None
    given = plan if isinstance(plan, MemoryPlan) else load_config(plan)
    if not verify and isinstance(given, MemoryPlan):
        given = replace(given, verify="off")
    elif not verify and isinstance(given, ActSwapConfig):
        given = replace(given, memory=replace(given.memory, verify="off"))
    return apply(model, given, transfer=transfer)


def assert_bitwise_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fail with the names of the gradients that differ in any bit."""
    assert actual.keys() == expected.keys()
    assert expected, "there is nothing to compare"
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def assert_same_training(actual: Run, expected: Run) -> None:
    """Fail unless all losses and all gradients of all steps are bitwise equal."""
    assert actual.losses == expected.losses
    assert len(actual.grads) == len(expected.grads) > 0
    for one, other in zip(actual.grads, expected.grads, strict=True):
        assert_bitwise_equal(one, other)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return everything that a plan could have changed on a model, comparable with ``==``."""
    config = getattr(model, "config", None)
    return {
        "class": type(model),
        "config": config.to_dict() if config is not None else None,
        "state_dict": list(model.state_dict()),
        "modules": {name: _module_state(module) for name, module in model.named_modules()},
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "modes": len(torch.overrides._get_current_function_mode_stack()),
    }


def _module_state(module: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {"type": type(module)}
    for name, value in vars(module).items():
        if "hooks" in name:
            state[name] = value.copy() if value is not None else None
        elif name not in ("_parameters", "_buffers", "_modules", "config"):
            state[name] = (
                value if isinstance(value, int | float | str | bool | None | Callable) else id(value)
            )
    return state


def _count(run: Run) -> None:
    run.layer_runs += 1
