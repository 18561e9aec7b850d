"""What else one does with a patched model: generate, evaluate, save, adapt, drop, plan; and what it saves."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
)

from hf_actswap.apply import apply
from hf_actswap.config import ParallelConfig
from hf_actswap.parallel.collectives import tensor_parallel_group
from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients, clip_grad_norm
from hf_actswap.parallel.patch_model import patch_model
from hf_actswap.parallel.vocabulary import LazyLogits
from hf_actswap.plan import model_structure as structure_of
from tests.parallel.collective_calls import noted
from tests.parallel.patch_worker import (
    BATCH,
    Case,
    batches,
    compare,
    config,
    drifting,
    full_gradients,
    gradients,
    relative_errors,
    step,
)
from tests.parallel.patched_models import HIDDEN, INNER, LAYERS, tiny_model
from tests.parallel.test_patch_model import assert_as_in_one_process
from tests.plan.stacked_models import TOWER
from tests.processes import launched, of_ranks, run_cases, told
from tests.quick_cases import slow_among

WORLD_SIZE, LENGTH, NEW_TOKENS = 2, 16, 20
STEPS, MAX_NORM = 5, 0.05
ADAPTED = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "qwen2": ["k_proj", "o_proj"],
}

Group = dist.ProcessGroup


def counted(calls: Counter[str]) -> AbstractContextManager[Callable[[str], None]]:
    """Count collectives as ``<part> <kind>``; yields what names the present part of the step."""

    def note(part: str, kind: str, _: tuple[Any, ...]) -> None:
        calls[f"{part} {kind}"] += 1

    return noted(note)


def adapted(model: Any, kind: str, dropout: float = 0.0) -> Any:
    """Return a model with LoRA adapters that do something."""
    settings = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=ADAPTED[kind])
    wrapped = get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter.data, std=0.1, generator=generator)
    return wrapped


def patched_pair(
    kind: str, group: Group, sequence_parallel: bool = True, **settings: Any
) -> tuple[Any, Any, Any]:
    """Return a model in one process, the same one patched, and the handle."""
    alone, model = tiny_model(kind, **settings), tiny_model(kind, **settings)
    return alone, model, patch_model(model, config(group, sequence_parallel), group)


def ids_of(length: int = LENGTH) -> torch.Tensor:
    """Return token ids ``[B, length]``, the same on every rank."""
    return batches(Case(length=length, masked=False))[0]["input_ids"]


def run_generation(kind: str, settings: dict[str, Any], group: Group) -> dict[str, Any]:
    """Greedy tokens, with a forward that trains before and backward after."""
    alone, model, _ = patched_pair(kind, group, **settings)
    loss = model(input_ids=ids_of(), labels=ids_of()).loss
    prompt = {"input_ids": ids_of(7), "attention_mask": torch.ones(BATCH, 7, dtype=torch.long)}
    prompt["attention_mask"][0, :2] = 0
    greedy: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    tokens = [one.eval().generate(**prompt, **greedy) for one in (model, alone)]
    loss.backward()
    return {"tokens": tokens[0], "expected": tokens[1]}


def run_outputs(group: Group) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What comes out of a patched model, and out of one process."""
    alone, model, _ = patched_pair("llama", group, vocab_size=129, attn_implementation="eager")
    ids = ids_of(17)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(name: str, call: Callable[[Any], torch.Tensor | tuple[torch.Tensor, ...]]) -> None:
        both = [call(one) for one in (model, alone)]
        for place, (found, expected) in enumerate(
            zip(*((one,) if isinstance(one, torch.Tensor) else one for one in both), strict=True)
        ):
            pairs[f"{name} {place}"] = found.detach().clone(), expected.detach()

    every = {"output_hidden_states": True, "output_attentions": True}
    for mode, trains in (("trains", True), ("evaluates", False)):
        with torch.set_grad_enabled(trains):
            note(f"{mode}: logits", lambda m: m(ids).logits)
            note(f"{mode}: last logits", lambda m: m(ids, logits_to_keep=3).logits)
            note(f"{mode}: hidden", lambda m: m(ids, **every).hidden_states)
            note(f"{mode}: attentions", lambda m: m(ids, **every).attentions)
            note(f"{mode}: decoder", lambda m: m.model(ids).last_hidden_state)
            note(f"{mode}: head", lambda m: m.lm_head(m.model(ids)[0]))
            note(f"{mode}: tuple", lambda m: m(ids, labels=ids, return_dict=False)[:2])
    return pairs


def run_own_losses(group: Group) -> dict[str, float]:
    """Relative errors of gradients where the caller computes a loss of its own from what came out."""
    ids = ids_of(17)
    losses: dict[str, Callable[[Any], torch.Tensor]] = {
        "logits": lambda m: m(ids).logits.square().mean(),
        "last logits": lambda m: m(ids, logits_to_keep=3).logits.square().mean(),
        "decoder": lambda m: m.model(ids).last_hidden_state.square().mean(),
        "head": lambda m: m.lm_head(m.model(ids)[0]).square().mean(),
        "hidden states": lambda m: m(ids, output_hidden_states=True).hidden_states[1].square().mean(),
        "lazy logits": lambda m: (lambda o: o.loss + o.logits[:, :-1].square().mean())(m(ids, labels=ids)),
        "loss of whole logits": lambda m: m.loss_function(m(ids).logits, ids, m.config.vocab_size),
    }
    errors = {}
    for name, loss_of in losses.items():
        alone, model, patched = patched_pair("llama", group, vocab_size=129)
        loss_of(alone).backward()
        loss_of(model).backward()
        allreduce_sequence_parallel_gradients(model, group)
        errors[name] = max(relative_errors(full_gradients(patched), gradients(alone)).values())
    return errors


def run_lazy(group: Group) -> dict[str, Any]:
    """Collectives of the logits of a model that trains: none until they are read."""
    _, model, _ = patched_pair("llama", group)
    seen: Counter[str] = Counter()
    ids = ids_of()
    with counted(seen) as begin:
        output = model(input_ids=ids, labels=ids)
        begin("cast")
        cast = output.logits.float().detach().to(torch.bfloat16)
        begin("read")
        top = cast[..., :-1, :].argmax(-1)
    return {
        "kind": type(output.logits) is LazyLogits,
        "calls": dict(seen),
        "shape": tuple(output.logits.shape),
        "read": tuple(top.shape),
        "text": repr(output.logits),
    }


def run_state(kind: str, settings: dict[str, Any], folder: str, group: Group) -> dict[str, Any]:
    """Save on all ranks; load in one process, and into a patched model of other weights."""
    alone, model, patched = patched_pair(kind, group, **settings)
    full, of_one = patched.full_state_dict(), patched.full_state_dict(only_rank=1)
    expected = alone.state_dict()
    differing = [name for name in expected if not torch.equal(full[name], expected[name])]
    other = tiny_model(kind, seed=9, **settings)
    again = patch_model(other, config(group, True), group)
    again.load_full_state_dict(full)
    by_torch = tiny_model(kind, seed=10, **settings)
    patch_model(by_torch, config(group, True), group)
    by_torch.load_state_dict(full)
    path = Path(folder, kind)
    model.save_pretrained(path, state_dict=dict(full), is_main_process=group.rank() == 0)
    dist.barrier(group)
    loaded = type(alone).from_pretrained(path).eval()
    with torch.no_grad():
        logits = [one.eval()(ids_of()).logits for one in (alone, loaded, other, by_torch, model)]
    return {
        "names": set(full) ^ set(expected),
        "saved_names": set(loaded.state_dict()) ^ set(expected),
        "tied": "lm_head.weight" not in full
        or (full["lm_head.weight"] is full["model.embed_tokens.weight"])
        == (alone.lm_head.weight is alone.model.embed_tokens.weight),
        "differing": differing,
        "of_one": len(of_one),
        "logits": logits,
        "sharded": patched.sharded,
        "description": patched.describe(),
    }


def run_training(kind: str, settings: dict[str, Any], group: Group) -> dict[str, Any]:
    """Five steps of AdamW with clipping: losses, weights against one process, and what drifted apart."""
    alone, model, patched = patched_pair(kind, group, **settings)
    losses: list[list[float]] = []
    for one in (alone, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-4)
        losses.append([])
        for _ in range(STEPS):
            losses[-1] += step(one, Case(kind, length=17, accumulation=2, settings=settings))
            if one is model:
                allreduce_sequence_parallel_gradients(optimizer, group)
                clip_grad_norm(one.parameters(), MAX_NORM, process_group=group)
            else:
                nn.utils.clip_grad_norm_(one.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    expected, found = alone.state_dict(), patched.full_state_dict()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {
        "losses": losses,
        "errors": {name: (found[name] - tensor).abs().max().item() for name, tensor in expected.items()},
        "drift": drifting(patched, weights),
    }


def run_adapters(kind: str, sequence_parallel: bool, settings: dict[str, Any], group: Group) -> Any:
    """Gradients of adapters."""
    case = Case(kind, sequence_parallel, settings=settings, accumulation=2, length=17)
    return compare(case, group, lambda model: adapted(model, kind))


def saved_of_layer(model: Any, layer: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return what one layer saves for backward, parameters excluded; each storage once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if inside[0] and tensor.untyped_storage().data_ptr() not in own:
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    inside = [False]
    layer.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
    layer.register_forward_hook(lambda *_: inside.__setitem__(0, False))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    return list(found.values())


def run_audit(wrap: str, group: Group) -> dict[str, Any]:
    """Shapes and bytes that the second layer saves."""
    model = tiny_model("llama", num_key_value_heads=4)
    if wrap:
        model = adapted(model, "llama")
    patch_model(model, config(group, True), group)
    base = model.get_base_model() if wrap else model
    saved = saved_of_layer(model, base.model.layers[1], ids_of())
    return {
        "shapes": sorted(tuple(t.shape) for t in saved),
        "bytes": sum(t.untyped_storage().nbytes() for t in saved),
    }


def run_autocast(group: Group) -> tuple[dict[str, float], float]:
    """Relative errors of gradients under autocast, and the loss's; norms and the residual stay float32."""
    alone, model, patched = patched_pair("llama", group)
    ids, losses = ids_of(17), []
    for one in (alone, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    allreduce_sequence_parallel_gradients(model, group)
    found = full_gradients(patched)
    errors = {n: ((found[n] - grad).norm() / grad.norm()).item() for n, grad in gradients(alone).items()}
    return errors, losses[1] - losses[0]


def run_copy(group: Group) -> dict[str, Any]:
    """A deep copy computes what the model does, with parameters, tags and hooks of its own."""
    _, model, patched = patched_pair("qwen3_moe", group)
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    other = tiny_model("qwen3_moe")
    patch_model(other, config(group, True), group)
    grads = []
    for one in (again, other):
        step(one, Case(length=17))
        allreduce_sequence_parallel_gradients(one, group)
        grads.append({name: p.grad for name, p in one.named_parameters()})
    return {
        "untouched": all(p.grad is None for p in model.parameters()),
        "differing": [name for name, grad in grads[0].items() if not torch.equal(grad, grads[1][name])],
        "tagged": len(patched.tagged),
    }


def run_collectives(sequence_parallel: bool, kind: str, group: Group) -> dict[str, int]:
    """Collectives of one layer: those of two models with one layer of difference."""
    totals = []
    for layers in (1, 2):
        _, model, _ = patched_pair(kind, group, sequence_parallel, num_hidden_layers=layers)
        seen: Counter[str] = Counter()
        ids = ids_of()
        with counted(seen) as begin:
            loss = model(input_ids=ids, labels=ids).loss
            begin("backward")
            loss.backward()
        totals.append(seen)
    return dict(totals[1] - totals[0])


PLAN = {
    "parallel_config": {"tensor_parallel_size": WORLD_SIZE, "sequence_parallel_enabled": True},
    "swap_config": {"swap": True, "default_prefetch": 4},
    "recompute_config": {"select_recompute": {"feed_forward": [0]}, "select_comm_recompute": True},
}
FULL_PLAN = {**PLAN, "recompute_config": {"recompute": [1]}}
FURTHER_PLANNED = ("olmo2", "deepseek_v3", "gemma3n_text", "gpt_oss")
"""Norms over the features of all heads, latent attention, further arguments of layers, biased experts."""
EXPERTS_PLAN = {
    "parallel_config": PLAN["parallel_config"],
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 4, "layers": [0, 1]}]},
    "recompute_config": {
        "select_recompute": {
            r"mlp\.experts": [0],
            r"feed_forward\.mul": [1],
            r"mlp\.experts\.routed_product": [1],
        }
    },
}
"""Experts that run again with their gathers, and experts of which functions alone do."""


def run_plan(kind: str, document: dict[str, Any], settings: dict[str, Any], group: Group) -> dict[str, Any]:
    """Gradients with a plan and without, and the communications that the plan's structure has seen."""
    found = []
    for planned in (False, True):
        _, model, _ = patched_pair(kind, group, **settings)
        communications: tuple[str, ...] = ()
        rows = 0
        if planned:
            with tensor_parallel_group(group):
                applied = apply(model, document)
            rows = len(applied.plan.rows)
            communications = structure_of(model).layers[0].communications
        step(model, Case(kind, length=17))
        allreduce_sequence_parallel_gradients(model, group)
        found.append(gradients(model))
    return {
        "differing": [name for name in found[0] if not torch.equal(found[0][name], found[1][name])],
        "communications": communications,
        "rows": rows,
        "missing": found[0].keys() ^ found[1].keys(),
    }


def _noting(masks: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def note(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        masks[name] = output.detach() == 0

    return note


def run_dropout(sequence_parallel: bool, group: Group) -> dict[str, Any]:
    """Masks of a model that drops, and gradients with and without recomputation."""
    drops = {"hidden_dropout": 0.4, "attention_dropout": 0.3}
    case = Case("gpt_neox", sequence_parallel, masked=False)
    found: list[dict[str, torch.Tensor]] = []
    masks: dict[str, torch.Tensor] = {}
    drift: list[str] = []
    for checkpointing in (False, True):
        _, model, patched = patched_pair("gpt_neox", group, sequence_parallel, **drops)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            layer = model.gpt_neox.layers[0]
            model.gpt_neox.emb_dropout.register_forward_hook(_noting(masks, "embedding"))
            layer.post_mlp_dropout.register_forward_hook(_noting(masks, "hidden"))
        step(model, case)
        state = torch.get_rng_state()
        allreduce_sequence_parallel_gradients(model, group)
        found.append(gradients(model))
        drift += drifting(patched, full_gradients(patched))
    return {
        "differing": [name for name in found[0] if not torch.equal(found[0][name], found[1][name])],
        "masks": masks,
        "state": state,
        "drift": drift,
    }


_VISION = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_IMAGE = {"image_size": 28, "patch_size": 14}
_IMAGE_TOKEN, _IMAGE_TOKENS = 95, 4


def gemma3_with_images() -> Any:
    """Return a tiny Gemma 3 whose tower has more layers than its decoder."""
    configuration = Gemma3Config(
        text_config=tiny_model("gemma3_text").config,
        vision_config={**_VISION, **_IMAGE},
        mm_tokens_per_image=_IMAGE_TOKENS,
        image_token_index=_IMAGE_TOKEN,
    )
    torch.manual_seed(3)
    return Gemma3ForConditionalGeneration(configuration).train()


def llama4_with_images() -> Any:
    """Return a tiny Llama 4, whose language model has its own head."""
    sizes = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), HIDDEN)
    vision = {**_VISION, **_IMAGE, **sizes}
    return Llama4ForConditionalGeneration(
        Llama4Config(text_config=tiny_model("llama4_text").config, vision_config=vision)
    )


def run_images(sequence_parallel: bool, group: Group) -> dict[str, Any]:
    """A step on an image and text, divided and in one process."""
    alone, model = gemma3_with_images(), gemma3_with_images()
    patched = patch_model(model, config(group, sequence_parallel), group)
    ids = ids_of(17).clamp(max=_IMAGE_TOKEN - 1)
    ids[:, 1 : 1 + _IMAGE_TOKENS] = _IMAGE_TOKEN
    pixels = torch.randn(len(ids), 3, 28, 28, generator=torch.Generator().manual_seed(2))
    inputs = {"input_ids": ids, "labels": ids, "pixel_values": pixels, "use_cache": False}
    inputs["token_type_ids"] = (ids == _IMAGE_TOKEN).long()
    losses = []
    for one in (alone, model):
        loss = one(**inputs).loss
        loss.backward()
        losses.append(loss.item())
    allreduce_sequence_parallel_gradients(model, group)
    found = full_gradients(patched)
    return {
        "losses": losses,
        "errors": relative_errors(found, gradients(alone)),
        "drift": drifting(patched, found),
        "divided": sorted(patched.sharded),
    }


class BiasBehindMLP(nn.Module):
    """What a model of an unknown family may do: a parameter of a block that is no part of the ranks' sum."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn, self.norm = mlp.act_fn, nn.LayerNorm(HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[B, S, H]``."""
        product: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return self.norm(product)


def run_rejections(group: Group) -> dict[str, str]:
    """Messages of what is rejected."""
    wanted = config(group, True)

    def patch(model: Any, asked: ParallelConfig = wanted) -> Any:
        return patch_model(model, asked, group)

    quick = partial(patch_model, parallel_config=wanted, group=group, timeout_s=5)
    odd = tiny_model("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    before = {name: tuple(p.shape) for name, p in odd.named_parameters()}
    behind = tiny_model("llama")
    for layer in behind.model.layers:
        layer.mlp = BiasBehindMLP(layer.mlp)
    patch_model(behind, config(group, False), group)
    twice = tiny_model("llama")
    patch(twice)
    fused = tiny_model("llama")
    patch(fused)
    fused.loss_function = lambda **_: torch.zeros((), requires_grad=True)
    cached = tiny_model("llama")
    patch(cached)
    jitter = tiny_model("mixtral", router_jitter_noise=0.1)
    untied = adapted(tiny_model("llama"), "llama")
    head = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    ids = ids_of(17)
    return {
        "heads": told(lambda: patch(odd)),
        "untouched": str(before == {name: tuple(p.shape) for name, p in odd.named_parameters()}),
        "group": told(lambda: patch(untied, ParallelConfig(tensor_parallel_size=4))),
        "unknown": told(lambda: patch(tiny_model("mamba"))),
        "sparse": told(lambda: patch(tiny_model("big_bird"))),
        "inside": told(lambda: patch(llama4_with_images())),
        "behind the sum": told(lambda: behind(input_ids=ids, labels=ids)),
        "twice": told(lambda: patch(twice)),
        "adapters after": told(lambda: adapted(twice, "llama")),
        "resize after": told(lambda: twice.resize_token_embeddings(100)),
        "fused loss": told(lambda: fused(input_ids=ids, labels=ids)),
        "cache": told(lambda: cached(input_ids=ids, use_cache=True)),
        "after": str(cached(input_ids=ids).logits.shape),
        "jitter": told(lambda: patch(jitter)),
        "head": told(lambda: patch(head)),
        "weights": told(lambda: quick(tiny_model("llama", seed=group.rank()))),
    }


ONE_KV_HEAD = {"num_key_value_heads": 1}
TIED_ODD = {"vocab_size": 129, "tie_word_embeddings": True}


def cases(folder: str) -> dict[str, Callable[[Group], object]]:
    """Return what is run, by name."""
    return {
        "generation_llama": partial(run_generation, "llama", ONE_KV_HEAD),
        "generation_gemma3_text": partial(run_generation, "gemma3_text", TIED_ODD),
        "generation_qwen3_moe": partial(run_generation, "qwen3_moe", {"output_router_logits": False}),
        "generation_phi3": partial(run_generation, "phi3", {}),
        "generation_gpt2": partial(run_generation, "gpt2", {}),
        "generation_bloom": partial(run_generation, "bloom", {}),
        "outputs": run_outputs,
        "own_losses": run_own_losses,
        "lazy": run_lazy,
        "state_qwen2": partial(run_state, "qwen2", {**ONE_KV_HEAD, **TIED_ODD}, folder),
        "state_phi3": partial(run_state, "phi3", ONE_KV_HEAD, folder),
        "state_mixtral": partial(run_state, "mixtral", {"vocab_size": 129}, folder),
        "training_qwen3": partial(run_training, "qwen3", ONE_KV_HEAD),
        "training_phi3": partial(run_training, "phi3", {**ONE_KV_HEAD, "vocab_size": 129}),
        "training_mixtral": partial(run_training, "mixtral", {}),
        "adapters_llama": partial(run_adapters, "llama", True, {}),
        "adapters_llama_replicated": partial(run_adapters, "llama", False, {}),
        "adapters_gpt_neox": partial(run_adapters, "gpt_neox", True, {}),
        "adapters_qwen2": partial(run_adapters, "qwen2", True, ONE_KV_HEAD),
        "audit": partial(run_audit, ""),
        "audit_adapters": partial(run_audit, "lora"),
        "autocast": run_autocast,
        "copy": run_copy,
        "collectives": partial(run_collectives, True, "llama"),
        "collectives_replicated": partial(run_collectives, False, "llama"),
        "collectives_experts": partial(run_collectives, True, "mixtral"),
        "collectives_experts_replicated": partial(run_collectives, False, "mixtral"),
        "plan": partial(run_plan, "llama", PLAN, {}),
        "plan_full": partial(run_plan, "llama", FULL_PLAN, {}),
        "plan_experts": partial(run_plan, "mixtral", PLAN, {}),
        "plan_experts_full": partial(run_plan, "mixtral", FULL_PLAN, {}),
        "plan_experts_ops": partial(run_plan, "mixtral", EXPERTS_PLAN, {}),
        "plan_neox": partial(run_plan, "gpt_neox", FULL_PLAN, {"hidden_dropout": 0.2}),
        **{f"plan_{family}": partial(run_plan, family, FULL_PLAN, {}) for family in FURTHER_PLANNED},
        "dropout": partial(run_dropout, True),
        "dropout_replicated": partial(run_dropout, False),
        "images": partial(run_images, True),
        "images_replicated": partial(run_images, False),
        "rejections": run_rejections,
    }


SLOW = (
    *(f"generation_{kind}" for kind in ("qwen3_moe", "phi3", "gpt2", "bloom")),
    *("state_phi3", "training_phi3", "adapters_llama_replicated", "adapters_gpt_neox"),
    *("plan_full", "plan_experts", "plan_experts_ops", *(f"plan_{family}" for family in FURTHER_PLANNED[1:])),
    *("images_replicated", "plan_neox", "state_mixtral", "training_mixtral"),
)
"""Cases that a quick launch leaves out: others show the same of another family, or of another plan."""


def run_on_rank(runs_slow: bool, rank: int, folder: str) -> None:
    """Run each case on two ranks."""
    every = {name: case for name, case in cases(folder).items() if runs_slow or name not in SLOW}
    run_cases(rank, folder, WORLD_SIZE, every, {name: [[0, 1]] for name in every})


LIMIT_S = 200
TOLERANCE = 1e-5
SIZE_BYTES = 4

pytestmark = pytest.mark.dist


results = launched(run_on_rank, WORLD_SIZE, LIMIT_S, told_of_slow=True)


@pytest.mark.parametrize(
    "kind",
    slow_among(
        ["llama", "gemma3_text", "qwen3_moe", "phi3", "gpt2", "bloom"],
        SLOW,
        "generation_",
    ),
)
def test_generation(kind: str, results: Path) -> None:
    for found in of_ranks(results, f"generation_{kind}"):
        assert torch.equal(found["tokens"], found["expected"])


def test_what_comes_out(results: Path) -> None:
    """Logits, hidden states, attentions, of whole shape and without padding, with gradients and without."""
    for found in of_ranks(results, "outputs"):
        assert {name.split(":")[0] for name in found} == {"trains", "evaluates"}
        for name, (actual, expected) in found.items():
            torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_losses_of_ones_own(results: Path) -> None:
    for errors in of_ranks(results, "own_losses"):
        assert {name: error for name, error in errors.items() if error > TOLERANCE} == {}
        assert len(errors) == 7


def test_logits_of_a_training_forward_are_gathered_when_read(results: Path) -> None:
    for found in of_ranks(results, "lazy"):
        assert found["kind"]
        assert found["shape"] == (2, 16, 96)
        assert found["read"] == (2, 15)
        gathers = {name: number for name, number in found["calls"].items() if name.endswith("all_gather")}
        assert gathers == {"forward all_gather": 2 * LAYERS + 1, "read all_gather": 1}
        assert "gathered when read" in found["text"]


@pytest.mark.parametrize("kind", slow_among(["qwen2", "phi3", "mixtral"], SLOW, "state_"))
def test_state(kind: str, results: Path) -> None:
    """Names, shapes and values of one process; loaded by from_pretrained and into other patched models."""
    for rank, found in enumerate(of_ranks(results, f"state_{kind}")):
        assert found["names"] == found["saved_names"] == set()
        assert found["tied"]
        assert found["differing"] == []
        assert (found["of_one"] > 0) == (rank == 1)
        expected, loaded, *divided = found["logits"]
        assert torch.equal(loaded, expected)
        for logits in divided:
            torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)
        assert found["sharded"]["lm_head.weight"] == 0
        assert "replicated: model.layers.*" in found["description"]


@pytest.mark.parametrize("kind", slow_among(["qwen3", "phi3", "mixtral"], SLOW, "training_"))
def test_training(kind: str, results: Path) -> None:
    """Steps with clipping: the losses and weights of one process; replicas stay bitwise the same."""
    assert MAX_NORM < 1
    for found in of_ranks(results, f"training_{kind}"):
        expected, losses = found["losses"]
        assert len(losses) == 2 * STEPS
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert losses[-1] < losses[0]
        assert max(found["errors"].values()) < TOLERANCE
        assert found["drift"] == []


@pytest.mark.parametrize(
    "name",
    slow_among(["llama", "llama_replicated", "gpt_neox", "qwen2"], SLOW, "adapters_"),
)
def test_adapters(name: str, results: Path) -> None:
    for found in of_ranks(results, f"adapters_{name}"):
        assert_as_in_one_process(found)
        assert all("lora_" in name for name in found.errors)


def test_saved_tensors(results: Path) -> None:
    """A layer saves parts of the sequence, and of the features, and nothing of full sequence and width."""
    tokens, heads = BATCH * LENGTH, 2
    part = tokens * HIDDEN // WORLD_SIZE
    inner = tokens * INNER // WORLD_SIZE
    norms = 2 * (3 * part + tokens // WORLD_SIZE)  # input, normalised, output; a number per token
    attention = 4 * part + tokens * heads + 2 * LENGTH * HIDDEN // 4  # q, k, v, output; statistics; rotary
    for found in of_ranks(results, "audit"):
        assert found["bytes"] == SIZE_BYTES * (norms + attention + 4 * inner)
        assert max(torch.Size(shape).numel() for shape in found["shapes"]) < tokens * HIDDEN


def test_saved_tensors_of_adapters(results: Path) -> None:
    """Frozen weights save no input; the adapters share one part of the sequence."""
    bare, adapted = (of_ranks(results, name)[0] for name in ("audit", "audit_adapters"))
    tokens = BATCH * LENGTH
    assert max(torch.Size(shape).numel() for shape in adapted["shapes"]) < tokens * HIDDEN
    ranks_of_adapters = sum(shape == (tokens, 4) for shape in adapted["shapes"])
    frozen_norms = 2 * tokens * HIDDEN // WORLD_SIZE  # what their weights' gradients would need
    more = ranks_of_adapters * tokens * 4 - frozen_norms
    assert ranks_of_adapters == 7
    assert adapted["bytes"] - bare["bytes"] == SIZE_BYTES * more


def test_collectives_of_a_layer(results: Path) -> None:
    for found in of_ranks(results, "collectives"):
        again = 2
        assert found == {
            "forward all_gather": 2,
            "forward reduce_scatter": 2,
            "backward all_gather": 2 + again,
            "backward reduce_scatter": 2,
        }
    for found in of_ranks(results, "collectives_replicated"):
        assert found == {"forward all_reduce": 2, "backward all_reduce": 2}


def test_collectives_of_a_layer_with_experts(results: Path) -> None:
    """Routing is one gather more, and its gradient one reduction."""
    for found in of_ranks(results, "collectives_experts"):
        again, routing = 2, 1
        assert found == {
            "forward all_gather": 2 + routing,
            "forward reduce_scatter": 2,
            "backward all_gather": 2 + again,
            "backward reduce_scatter": 2 + routing,
        }
    for found in of_ranks(results, "collectives_experts_replicated"):
        assert found == {"forward all_reduce": 2, "backward all_reduce": 3}


@pytest.mark.parametrize(
    ("name", "block_ends"),
    [
        ("plan", ("self_attn.o_proj", "mlp.down_proj")),
        pytest.param("plan_full", ("self_attn.o_proj", "mlp.down_proj"), marks=pytest.mark.slow),
        pytest.param("plan_neox", ("attention.dense", "mlp.dense_4h_to_h"), marks=pytest.mark.slow),
    ],
)
def test_plans(name: str, block_ends: tuple[str, str], results: Path) -> None:
    """Swap, recomputation and communicating again on a patched model: gradients bitwise those without."""
    for found in of_ranks(results, name):
        assert found["differing"] == []
        assert found["missing"] == set()
        assert found["rows"] > 0
        assert found["communications"] == (
            "input_layernorm.all_gather",
            f"{block_ends[0]}.reduce_scatter",
            "post_attention_layernorm.all_gather",
            f"{block_ends[1]}.reduce_scatter",
        )


@pytest.mark.parametrize("family", slow_among(FURTHER_PLANNED, SLOW, "plan_"))
def test_plans_of_further_families(family: str, results: Path) -> None:
    """Gradients bitwise those without."""
    for found in of_ranks(results, f"plan_{family}"):
        assert (found["differing"], found["missing"]) == ([], set())
        assert found["rows"] > 0


@pytest.mark.parametrize("name", slow_among(["plan_experts", "plan_experts_full", "plan_experts_ops"], SLOW))
def test_plans_of_experts(name: str, results: Path) -> None:
    """Gradients bitwise those without; a model structure sees how experts communicate."""
    for found in of_ranks(results, name):
        assert found["differing"] == []
        assert found["missing"] == set()
        assert found["rows"] > 0
        assert found["communications"] == (
            "input_layernorm.all_gather",
            "self_attn.o_proj.reduce_scatter",
            "mlp.experts.all_gather",
            "mlp.experts.reduce_scatter",
        )


@pytest.mark.parametrize("name", slow_among(["images", "images_replicated"], SLOW))
def test_images(name: str, results: Path) -> None:
    """The decoder of a model that sees is divided, its deeper tower is not; gradients of both are right."""
    for found in of_ranks(results, name):
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5)
        assert max(found["errors"].values()) < 1e-4
        assert {path.partition(".layers.")[0] for path in found["errors"]} > {
            TOWER.removesuffix(".layers"),
            "model.language_model",
        }
        assert found["drift"] == []
        assert any(".layers." in path for path in found["divided"])
        assert not any("vision" in path for path in found["divided"])


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_dropout(sequence_parallel: bool, results: Path) -> None:
    """Masks differ on parts, agree on replicas, and are the same in recomputation."""
    one, other = of_ranks(results, "dropout" if sequence_parallel else "dropout_replicated")
    assert one["differing"] == other["differing"] == []
    assert one["drift"] == []
    assert torch.equal(one["masks"]["embedding"], other["masks"]["embedding"])
    assert torch.equal(one["masks"]["hidden"], other["masks"]["hidden"]) is not sequence_parallel
    assert torch.equal(one["state"], other["state"])


def test_autocast(results: Path) -> None:
    """Under bfloat16 autocast gradients agree to a few of its roundings."""
    for errors, difference in of_ranks(results, "autocast"):
        assert max(errors.values()) < 2e-2
        assert abs(difference) < 1e-3


def test_deep_copy(results: Path) -> None:
    for found in of_ranks(results, "copy"):
        assert found["untouched"]
        assert found["differing"] == []
        assert found["tagged"] > 0


REJECTIONS = {
    "heads": "a divisor of 3, the number of attention heads",
    "group": "expected 4 ranks",
    "unknown": "whose projections are known",
    "sparse": "Load the model with attention_type='original_full'",
    "inside": "Llama4ForConditionalGeneration around a Llama4ForCausalLM. Pass its language_model",
    "behind the sum": "in it is added to what the ranks sum",
    "twice": "divided already",
    "adapters after": "ColumnParallelLinear",
    "resize after": "Resize the whole model, then patch it",
    "fused loss": "fused loss",
    "cache": "use_cache=False",
    "jitter": "router_jitter_noise",
    "head": "take it out of target_modules",
    "weights": "weights: expected the same on all ranks",
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejections(name: str, results: Path) -> None:
    for found in of_ranks(results, "rejections"):
        assert REJECTIONS[name] in found[name]


def test_a_rejection_leaves_the_model_as_it_was(results: Path) -> None:
    for found in of_ranks(results, "rejections"):
        assert found["untouched"] == "True"
        assert found["after"] == "torch.Size([2, 17, 96])"
