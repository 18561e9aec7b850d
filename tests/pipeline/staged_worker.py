"""What each process runs: steps of a staged model, and of the whole one on the same micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from hf_actswap import load_config, model_structure, resolve_plan
from hf_actswap.apply import apply_plan
from hf_actswap.config.schema import PipelineSchedule
from hf_actswap.engine import PageableSlabs, Resources, host_budget
from hf_actswap.engine.schedule import Pass, PassOrder, Point
from hf_actswap.pipeline import PipelineRuntime, StagedModel, check_cut
from hf_actswap.pipeline.runtime import StageGradients, whole_state
from hf_actswap.plan import build_layout
from tests.engine.simulated_transfer import Clock
from tests.pipeline.test_swap_over_passes import CountingTransfer
from tests.processes import run_cases

VOCABULARY = 67
_CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}
SWAP = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 400, "layers": True}]}}
MIXED = {
    "swap_config": {
        "swap": True,
        "op_swap": [{"op_name": "attention", "backward_prefetch": 4, "layers": [0, 3]}],
    },
    "recompute_config": {"recompute": [1], "select_recompute": {"feed_forward": [2]}},
}
SELECT = {"recompute_config": {"select_recompute": True}}


@dataclass(frozen=True)
class Case:
    """Steps of one model.

    Args:
        schedule: as written.
        sections: of the configuration, without ``parallel_config``.
        family: of the model.
        layers: of the model.
        interleaves: ``pp_interleave_num``.
        offset: of the layout.
        micro_batches: per step.
        lengths: of the rows of micro-batches, in turn.
        steps: how many.
        rate: bytes per ms that copies move each way by a simulated clock, beside compute; 0: they are real.
    """

    schedule: PipelineSchedule = "1f1b"
    sections: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    layers: int = 4
    interleaves: int = 1
    offset: Any = 0
    micro_batches: int = 6
    lengths: tuple[int, ...] = (12,)
    steps: int = 1
    rate: float = 0.0


@dataclass(frozen=True)
class Result:
    """What a rank found.

    Args:
        differing: gradients that are not bitwise those of one process, with the largest difference.
        losses, norms: per step, whether they are bitwise equal.
        evaluation: whether the loss of an evaluation is.
        held: parameters that this rank holds.
        state: whether the whole state is that of the model; ``None`` on other ranks.
        forwards: of each layer's module, in one step, those of recomputation included.
        offloads: in all steps.
        restored: whether the model is whole again after `StagedModel.restore`; ``None`` on other ranks.
        passes: that came to hooks in the last step, in this order, by their number in the schedule's.
        swapped: bytes that a micro-batch swaps in the last step, and the most of all that are on the device
            at a time. Counted on a simulated clock.
    """

    differing: dict[str, float]
    losses: list[bool]
    norms: list[bool]
    evaluation: bool
    held: list[str]
    state: bool | None
    forwards: dict[int, int]
    offloads: int
    restored: bool | None
    passes: list[int]
    swapped: tuple[float, int] = (0.0, 0)


class WatchedPasses(PassOrder):
    """Notes which passes come to hooks.

    Attributes:
        seen: numbers of the passes of the latest step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def begin(self, order: Sequence[Pass] = ()) -> None:
        """See `PassOrder`."""
        if order:
            self.seen.clear()
        super().begin(order)

    def run_due(self, now: Point) -> int:
        """See `PassOrder`."""
        if self.seen[-1:] != [now[0]]:
            self.seen.append(now[0])
        return super().run_due(now)


def tiny_model(family: str, layers: int) -> nn.Module:
    """A model whose layers differ, the same on every rank."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": layers, "tie_word_embeddings": False}
    if family == "tied":
        return LlamaForCausalLM(LlamaConfig(**{**sizes, "tie_word_embeddings": True}))
    if family == "gemma2":
        config = Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=2.0, sliding_window=4)
        return Gemma2ForCausalLM(config)
    if family == "granite":
        scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
        return GraniteForCausalLM(GraniteConfig(**sizes, **scales))
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
    if family == "gpt2":
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=64, **rates)
        )
    if family == "sdpa":
        sizes["attn_implementation"] = "sdpa"
    model = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.2 if family == "dropout" else 0.0))
    if family == "lora":
        return with_adapters(model)
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    """LoRA whose second matrices are not zero, so that every gradient says something."""
    from peft import LoraConfig, get_peft_model

    made: nn.Module = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return made


def batches_of(case: Case) -> list[dict[str, torch.Tensor]]:
    """Micro-batches with rows of padding and labels that are not counted."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(case.micro_batches):
        shape = (2, case.lengths[number % len(case.lengths)])
        ids = torch.randint(0, VOCABULARY, shape, generator=generator)
        labels, mask = ids.clone(), torch.ones_like(ids)
        labels[0, : number + 1] = -100
        mask[1, : number % 3] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def call(model: nn.Module, tokens: int, batch: dict[str, torch.Tensor], is_last: bool) -> Any:
    """What one micro-batch adds to the loss of a step of so many tokens."""
    if is_last:
        return model(**batch, num_items_in_batch=tokens).loss
    return model(**{name: value for name, value in batch.items() if name != "labels"})


def staged_of(case: Case, model: nn.Module, stages: int, stage: int) -> tuple[StagedModel, Any]:
    """The model in stages, proven and cut, and what is on it."""
    parallel = {"pipeline_stage": stages, "pp_interleave_num": case.interleaves, "offset": case.offset}
    config = load_config({**case.sections, "parallel_config": parallel})
    shape = model_structure(model)
    layout, problems = build_layout(case.layers, config.parallel_config)
    assert layout is not None, problems
    staged = StagedModel(model, shape, layout, stage)
    staged.passes = WatchedPasses()
    check_cut(staged, nullcontext)
    staged.cut()
    plan = staged.plan_of_stage(resolve_plan(config, shape))
    resources = Resources(passes=staged.passes)
    if case.rate:
        clock = Clock()
        clock.drive(model)
        resources = replace(resources, transfer=CountingTransfer(clock, case.rate))
    return staged, apply_plan(model, replace(plan, unsupported=()), shape, resources)


def counted(staged: StagedModel) -> Counter[int]:
    """Count the calls of the MLP of each layer, which recomputation makes again."""
    found: Counter[int] = Counter()

    def count(index: int, *_: Any) -> None:
        found[index] += 1

    for index in staged.layout.layers_of(staged.stage):
        layer = staged.model.get_submodule(staged.structure.layers[index].module_path)
        layer.get_submodule("mlp").register_forward_pre_hook(partial(count, index))
    return found


def run_case(case: Case, group: dist.ProcessGroup | None, device: torch.device = _CPU) -> Result:
    """Run the steps on this rank, whole and staged."""
    assert group is not None
    stage = dist.get_rank(group)
    reference, model = (tiny_model(case.family, case.layers).to(device) for _ in range(2))
    staged, applied = staged_of(case, model, dist.get_world_size(group), stage)
    forwards = counted(staged)
    runtime = PipelineRuntime(staged, group, case.schedule, device)
    gradients = StageGradients(staged, group, device)
    batches = [{name: one.to(device) for name, one in batch.items()} for batch in batches_of(case)]
    tokens = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches)
    differing: dict[str, float] = {}
    losses, norms = [], []
    for _ in range(case.steps):
        before = applied.stats()
        reference.zero_grad()
        model.zero_grad()
        forwards.clear()
        expected = [call(reference, tokens, batch, True) for batch in batches]
        for loss in expected:
            loss.backward()
        found = runtime.step(batches, partial(call, model, tokens))
        gradients.sum_shared()
        losses.append(torch.equal(found, torch.stack(expected).detach()))
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
        norms.append(torch.equal(gradients.norm(), norm))
        differing |= differences(staged, reference)
    calls = dict(forwards)
    with torch.no_grad():
        loss = call(reference, tokens, batches[-1], True)
        same = torch.equal(runtime.evaluate(batches[-1], partial(call, model, tokens)), loss)
    state = whole_state(staged, group)
    offloads = applied.stats().offloads
    swapped = (applied.stats() - before).offloaded_bytes / case.micro_batches, 0
    if isinstance(applied.transfer, CountingTransfer):
        swapped = swapped[0], max(applied.transfer.most_bytes.values())
    applied.remove()
    held = [name for name in staged.own_state() if not staged.own_state()[name].is_meta]
    restored = restores(staged, state, reference) if stage == 0 else None
    equal = same_state(state, reference) if stage == 0 else None
    passes = staged.passes.seen if isinstance(staged.passes, WatchedPasses) else []
    facts = held, equal, calls, offloads, restored, passes, swapped
    return Result(differing, losses, norms, same, *facts)


@dataclass(frozen=True)
class InFlight:
    """What a rank holds for backward at most in a step.

    Args:
        passes: calls of its chunks of which something is held.
        held_bytes: storages that autograd saves, parameters apart.
        one_bytes: the same in a step of one micro-batch.
    """

    passes: int
    held_bytes: int
    one_bytes: int


class Meter:
    """Counts what autograd holds for backward, by storages and by calls of the model."""

    def __init__(self, model: nn.Module) -> None:
        self._owned = {p.untyped_storage().data_ptr() for p in model.parameters() if not p.is_meta}
        self._storages: Counter[tuple[int, int]] = Counter()
        self._calls: Counter[int] = Counter()
        self.call, self.most_calls, self.most_bytes = 0, 0, 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves a tensor."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key[0] in self._owned:
            return _Held(tensor, lambda: None)
        self._storages[key] += 1
        self._calls[self.call] += 1
        held = sum(size for (_, size), count in self._storages.items() if count)
        self.most_bytes = max(self.most_bytes, held)
        self.most_calls = max(self.most_calls, sum(count > 0 for count in self._calls.values()))
        return _Held(tensor, partial(self._freed, key, self.call))

    def _freed(self, key: tuple[int, int], call: int) -> None:
        self._storages[key] -= 1
        self._calls[call] -= 1


class _Held:
    def __init__(self, tensor: torch.Tensor, freed: Any) -> None:
        self.tensor, self._freed = tensor, freed

    def __del__(self) -> None:
        self._freed()


def in_flight(case: Case, group: dist.ProcessGroup | None) -> InFlight:
    """Run a step of equal micro-batches, and one of a single micro-batch."""
    assert group is not None
    model = tiny_model(case.family, case.layers)
    staged, applied = staged_of(case, model, dist.get_world_size(group), dist.get_rank(group))
    applied.remove()
    found = []
    for count in (case.micro_batches, 1):
        runtime, meter = PipelineRuntime(staged, group, case.schedule, torch.device("cpu")), Meter(model)

        def counted_call(batch: dict[str, torch.Tensor], is_last: bool, meter: Meter = meter) -> Any:
            meter.call += 1
            return call(model, 1, batch, is_last)

        with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda held: held.tensor):
            runtime.step([batches_of(case)[1] for _ in range(count)], counted_call)
        found.append(meter)
    return InFlight(found[0].most_calls, found[0].most_bytes, found[1].most_bytes)


def differences(staged: StagedModel, reference: nn.Module) -> dict[str, float]:
    """Gradients that are not bitwise those of the whole model."""
    expected, found = dict(reference.named_parameters()), {}
    for name, parameter in staged.own_state().items():
        wanted = expected[name].grad if name in expected else None
        if wanted is None and getattr(parameter, "grad", None) is None:
            continue
        if wanted is None or parameter.grad is None:
            found[name] = float("inf")
        elif not torch.equal(parameter.grad, wanted):
            found[name] = float((parameter.grad - wanted).abs().max())
    return found


def same_state(state: dict[str, torch.Tensor], reference: nn.Module) -> bool:
    """Whether a state dict is that of a model."""
    expected = reference.state_dict()
    return list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in state)


def restores(staged: StagedModel, state: dict[str, torch.Tensor], reference: nn.Module) -> bool:
    """Whether a model is as before once the stages are taken off."""
    staged.restore(state)
    one, other = list(staged.model.named_modules()), list(reference.named_modules())
    same = [(name, type(module)) for name, module in one] == [(name, type(m)) for name, m in other]
    parameters = [name for name, _ in staged.model.named_parameters()]
    return (
        same
        and same_state(dict(staged.model.state_dict()), reference)
        and parameters == [name for name, _ in reference.named_parameters()]
    )


OPS = {
    "swap_config": {
        "swap": True,
        "op_swap": [{"op_name": "attention", "backward_prefetch": 4, "layers": True}],
    }
}
TABLE = {"recompute_config": {"recompute": [1, 2]}}
PLANS: dict[str, dict[str, Any]] = {
    "keep": {},
    "swap": SWAP,
    "mixed": MIXED,
    "select": SELECT,
    "table": TABLE,
}
PLANS_OF = {
    "gpipe": ("swap", "mixed", "table"),
    "1f1b": tuple(PLANS),
    "interleaved_1f1b": ("keep", "swap", "mixed", "table"),
    "zero_bubble": ("keep", "swap", "mixed"),
}
FAMILIES = ("tied", "gemma2", "granite", "mixtral", "gpt2", "lora")
AUTO = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": "auto", "layers": True}]}}
WATCHED: dict[str, Any] = {"steps": 4, "rate": 3e3}
"""The third step is the one whose windows are chosen."""
TWO: dict[str, Case] = {
    **{
        f"{schedule} {name}": Case(
            schedule,  # type: ignore[arg-type]
            PLANS[name],
            interleaves=2 if schedule == "interleaved_1f1b" else 1,
            steps=2 if name == "mixed" else 1,
        )
        for schedule, names in PLANS_OF.items()
        for name in names
    },
    **{f"{family} 1f1b": Case("1f1b", SWAP, family=family) for family in FAMILIES},
    "lora zero_bubble": Case("zero_bubble", SWAP, family="lora"),
    "gpipe interleaved": Case("gpipe", SWAP, interleaves=2),
    "zero_bubble interleaved": Case("zero_bubble", MIXED, interleaves=2),
    "interleaved_1f1b auto swap": Case("interleaved_1f1b", AUTO, interleaves=2, **WATCHED),
    "lengths": Case("1f1b", SWAP, lengths=(12, 9, 14), steps=2),
    "few": Case("1f1b", {}, micro_batches=1),
    "uneven": Case("1f1b", {"recompute_config": {"recompute": [1, 2]}}, layers=5, offset=[1, 0]),
    "golden R13": Case(
        "interleaved_1f1b", {"recompute_config": {"recompute": [4, 2]}}, layers=12, interleaves=3
    ),
    "golden R15": Case(
        "interleaved_1f1b", {"recompute_config": {"recompute": [[5, 1], [0, 9]]}}, layers=8, interleaves=2
    ),
    "ops 1f1b": Case("1f1b", OPS, "sdpa", steps=2),
    "ops interleaved": Case("interleaved_1f1b", OPS, "sdpa", interleaves=2, steps=2),
    "head alone": Case("1f1b", {}, layers=4, offset=[2, -2]),
    "in flight 1f1b": Case("1f1b"),
    "in flight gpipe": Case("gpipe"),
    "in flight interleaved": Case("interleaved_1f1b", interleaves=2),
}
"""Two stages."""

_SLOW = (
    *("gpipe mixed", "gpipe table", "gpipe interleaved", "interleaved_1f1b keep", "few"),
    *("interleaved_1f1b table", "zero_bubble keep", "gemma2 1f1b", "granite 1f1b", "gpt2 1f1b"),
    *("lora zero_bubble", "golden R13", "1f1b select", "1f1b table"),
    *("golden R15", "interleaved_1f1b auto swap", "zero_bubble interleaved"),
)
TWO_MORE: dict[str, Case] = {
    **{name: TWO.pop(name) for name in _SLOW},
    "zero_bubble table": Case("zero_bubble", TABLE),
    "gpipe keep": Case("gpipe"),
    **{
        f"{schedule} auto swap": Case(schedule, AUTO, **WATCHED)  # type: ignore[arg-type]
        for schedule in ("gpipe", "1f1b", "zero_bubble")
    },
    "zero_bubble select": Case("zero_bubble", SELECT),
    **{f"{family} zero_bubble": Case("zero_bubble", SWAP, family=family) for family in FAMILIES[:-1]},
    **{f"{family} mixed": Case("interleaved_1f1b", MIXED, family, interleaves=2) for family in FAMILIES},
}
"""Two stages, slow."""

FOUR: dict[str, Case] = {
    "golden R7": Case("1f1b", {"recompute_config": {"recompute": [2, 1, 0, 0]}}, layers=8),
    "four mixed": Case("1f1b", MIXED),
    "four interleaved": Case("interleaved_1f1b", MIXED, layers=8, interleaves=2, micro_batches=8),
    "four zero_bubble": Case("zero_bubble", SWAP),
    "four tied": Case("1f1b", SWAP, family="tied"),
    "three of four": Case("1f1b", SWAP, micro_batches=3),
    "four auto swap": Case("1f1b", AUTO, layers=16, micro_batches=8, steps=4, rate=2600.0),
    "in flight 1f1b": Case("1f1b"),
    "in flight few": Case("1f1b", micro_batches=3),
    "in flight interleaved": Case("interleaved_1f1b", layers=8, interleaves=2, micro_batches=8),
    "in flight zero_bubble": Case("zero_bubble", micro_batches=8),
}
"""Four stages."""

FIVE: dict[str, Case] = {
    "golden R1": Case(
        "interleaved_1f1b",
        {"recompute_config": {"recompute": [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]}},
        layers=48,
        interleaves=2,
        offset=[[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
        micro_batches=5,
    ),
}
"""Five stages: the table of the document."""


def run_on_rank(cases: dict[str, Case], world_size: int, rank: int, folder: str) -> None:
    """Run the cases of so many stages."""
    host_budget.PinnedSlabs = lambda *_: PageableSlabs()  # type: ignore[assignment, misc]
    runs: Any = {
        name: partial(in_flight if name.startswith("in flight") else run_case, case)
        for name, case in cases.items()
    }
    run_cases(rank, folder, world_size, runs, {name: [list(range(world_size))] for name in cases})
