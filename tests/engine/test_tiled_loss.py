"""``tile_config.loss``: head and loss tile by tile give what the whole ones give, without all logits."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.trainer_pt_utils import LabelSmoother

from hf_actswap import MemoryPlan, PlanError, apply, load_config, model_structure, resolve_plan
from hf_actswap.config import TileTokens
from hf_actswap.engine import TiledLogits
from hf_actswap.engine.tiled_calls import add_product
from hf_actswap.engine.tiled_logits import NOT_CALLED, auto_tokens, tile_head
from hf_actswap.plan import Tile
from hf_actswap.report import plan_table
from tests.engine.tiny_models import CASES, EXPERTS, gradients, tiny, tiny_llama

VOCABULARY, LENGTH, IGNORED = 200, 24, -100
TOKENS: dict[str, Any] = {"tile_config": {"loss": {"tokens": 10}}}
"""Not a divisor of 2 x 24 tokens, so that the last tile is shorter and some hold the end of one sequence."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "gemma2, softcapping": ("Gemma2", {"final_logit_softcapping": 0.5}),
    "granite, scaled": ("Granite", {"logits_scaling": 3.0}),
    "cohere, scaled": ("Cohere", {"logit_scale": 0.3}),
    # Products of experts grouped by PyTorch are none of float64, in which the truth is computed.
    "mixtral, auxiliary loss": ("Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "gpt_neox": ("GPTNeoX", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
}
"""Name -> family as of `tiny`, and settings."""

Step = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
STEPS: dict[str, Step] = {
    "labels": lambda model, ids, labels: model(input_ids=ids, labels=labels).loss,
    "items in batch": lambda model, ids, labels: (
        model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(77)).loss
    ),
    "scaled for accumulation": lambda model, ids, labels: model(input_ids=ids, labels=labels).loss / 3,
    "tuple": lambda model, ids, labels: model(input_ids=ids, labels=labels, return_dict=False)[0],
    "label smoothing of the Trainer": lambda model, ids, labels: LabelSmoother(0.1)(
        model(input_ids=ids), labels, shift_labels=True
    ),
    "label smoothing of torch": lambda model, ids, labels: F.cross_entropy(
        model(input_ids=ids).logits[:, :-1].reshape(-1, VOCABULARY),
        labels[:, 1:].reshape(-1),
        label_smoothing=0.1,
    ),
    "log-probabilities": lambda model, ids, labels: (
        -model(input_ids=ids).logits.log_softmax(-1).gather(2, ids.unsqueeze(-1)).mean()
    ),
    "last tokens": lambda model, ids, labels: (
        model(input_ids=ids, labels=labels, logits_to_keep=15, shift_labels=labels[:, -15:].contiguous()).loss
    ),
}
"""What gives a loss, in the order in which a model, the Trainer or a user would ask for it."""


def made(family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    name, settings = FAMILIES[family]
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "pad_token_id": 0}
    return tiny(name, **sizes, **settings).to(dtype)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :7] = IGNORED
    return ids, labels


def run(model: Any, step: Step = STEPS["labels"]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = step(model, *data())
    loss.backward()
    return loss.detach(), gradients(model)


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], small: float = 1e-6) -> float:
    """Return the largest relative difference of a gradient; of one that is zero but for rounding none.

    Args:
        small: norm of such a one, beside the largest of all.
    """
    assert found.keys() == expected.keys()
    largest = max(float(one.norm()) for one in expected.values())
    return max(
        float((found[name] - one).norm() / one.norm())
        for name, one in expected.items()
        if one.norm() > small * largest
    )


class NoLogits(TorchDispatchMode):
    """Fails where a tensor with a row of logits for more tokens than a tile is made.

    Args:
        sizes: of rows of logits.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self._sizes = sizes or (VOCABULARY,)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) is not torch.Tensor or leaf.is_meta or not leaf.dim():
                continue
            if (size := leaf.shape[-1]) in self._sizes:
                a_weight = leaf.shape in ((32, size), (4, size))  # transposed; of an adapter
                assert a_weight or leaf.numel() <= 10 * max(self._sizes), func
        return out


EVERYWHERE = ("labels", "items in batch", "label smoothing of the Trainer")


@pytest.mark.parametrize(
    ("family", "step"),
    [(family, step) for family in FAMILIES for step in STEPS if family == "llama" or step in EVERYWHERE],
)
def test_losses_bitwise_and_gradients_to_rounding(family: str, step: str) -> None:
    model = made(family)
    loss, expected = run(model, STEPS[step])
    with apply(model, TOKENS) as applied, NoLogits():
        tiled_loss, found = run(model, STEPS[step])
    assert not applied.plan.adjustments, "nothing made the logits whole"
    if "smoothing of torch" in step:  # it divides two sums, and the tiles one
        torch.testing.assert_close(tiled_loss, loss, rtol=1e-6, atol=0)
    else:
        assert torch.equal(tiled_loss, loss)
    _, truth = run(model.double(), STEPS[step])
    assert furthest(found, truth) < 1e-6
    assert furthest(found, expected) < 2e-6, "each of the two may be 1e-6 away from the truth"


def test_without_tiles_all_logits_are_there() -> None:
    with pytest.raises(AssertionError, match="aten"), NoLogits():
        run(made())


@pytest.mark.parametrize("written", [{"tokens": 10}, 5, 48, {"tokens": 1}])
def test_any_division(written: Any) -> None:
    model = made()
    loss, expected = run(model)
    with apply(model, {"tile_config": {"loss": written}}):
        assert isinstance(model(input_ids=data()[0]).logits, TiledLogits)
        tiled_loss, found = run(model)
    torch.testing.assert_close(tiled_loss, loss, rtol=1e-6, atol=0)  # one row has a kernel of its own
    assert furthest(found, expected) < 2e-6


def heads(kind: str) -> nn.Module:
    model = made()
    if kind == "bias":
        model.lm_head = nn.Linear(32, VOCABULARY)
    if kind == "frozen":
        model.lm_head.requires_grad_(False)
    if kind == "all frozen but the head":
        model.model.requires_grad_(False)
    if kind == "lora":
        return get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        )
    if kind == "modules_to_save":
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    return model


@pytest.mark.parametrize("kind", ["bias", "frozen", "all frozen but the head", "lora", "modules_to_save"])
@pytest.mark.parametrize("step", ["labels", "label smoothing of the Trainer"])
def test_heads(kind: str, step: str) -> None:
    model = heads(kind)
    loss, expected = run(model, STEPS[step])
    with apply(model, TOKENS) as applied, NoLogits():
        tiled_loss, found = run(model, STEPS[step])
    assert torch.equal(tiled_loss, loss)
    assert furthest(found, expected) < 1e-6
    assert any("lm_head" in name for name in found) == (kind != "frozen")
    assert not applied.plan.adjustments


@pytest.mark.parametrize("kind", ["lora", "bias"])
def test_autocast_as_without(kind: str) -> None:
    model = heads(kind)

    def step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, labels=labels).loss

    loss, expected = run(model, step)
    with apply(model, TOKENS), NoLogits():
        tiled_loss, found = run(model, step)
    assert torch.equal(tiled_loss, loss)
    assert {one.dtype for one in found.values()} == {torch.float32}
    assert furthest(found, expected) < 0.02


def test_dropout_of_an_adapter_draws_the_same_when_the_head_runs_again() -> None:
    config = LoraConfig(r=4, target_modules=["lm_head"], lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(made(), config)
    with apply(model, TOKENS):
        logits = model(input_ids=data()[0]).logits
        probabilities = logits.softmax(-1).amax(-1)
        before = torch.get_rng_state()
        again = logits.softmax(-1).amax(-1)
        assert torch.equal(torch.get_rng_state(), before)
        torch.testing.assert_close(again, probabilities, rtol=0, atol=0)
        assert not torch.equal(model(input_ids=data()[0]).logits.softmax(-1).amax(-1), probabilities)


def test_half_precision_is_as_close_to_the_truth_as_without() -> None:
    """Of the same bf16 hidden states and weights, computed in fp64."""
    model = made(dtype=torch.bfloat16)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.lm_head.register_forward_pre_hook(lambda _, args: args[0].retain_grad())
    errors = []
    for loss in ("off", {"tokens": 4}):
        with apply(model, {"tile_config": {"loss": loss}}):
            _, found = run(model, STEPS["scaled for accumulation"])
        hidden = seen[-1].detach().double().requires_grad_()
        weight = model.lm_head.weight.detach().double().requires_grad_()
        labels = F.pad(data()[1], (0, 1), value=IGNORED)[:, 1:].reshape(-1)
        (F.cross_entropy((hidden @ weight.t()).view(-1, VOCABULARY), labels) / 3).backward()
        of_hidden, of_weight = seen[-1].grad, found["lm_head.weight"]
        assert of_hidden is not None
        assert hidden.grad is not None
        assert weight.grad is not None
        errors.append((float((of_hidden - hidden.grad).norm()), float((of_weight - weight.grad).norm())))
    (whole_hidden, whole_weight), (tiled_hidden, tiled_weight) = errors
    assert 0 < tiled_hidden <= whole_hidden
    assert 0 < tiled_weight <= whole_weight


class Meter(TorchDispatchMode):
    """Counts the bytes of all storages that live at once, but for those that are there before."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        grads = (item.grad for item in model.parameters() if item.grad is not None)
        held = (*model.parameters(), *model.buffers(), *grads)
        self._seen = {item.untyped_storage()._cdata for item in held}
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) is torch.Tensor and not leaf.is_meta:
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size


def test_head_and_loss_hold_one_chunk() -> None:
    """At most six hidden states above the rest: a chunk of `auto` and the gradients of the hidden states."""
    hidden, vocabulary, tokens = 64, 512, 16_384
    assert auto_tokens(tokens, hidden, vocabulary) == 1024
    model = made()
    model.model = _Hidden(hidden)
    model.lm_head = nn.Linear(hidden, vocabulary, bias=False)
    model = model.to(torch.bfloat16)
    model.config.vocab_size = vocabulary
    undo = tile_head(model.lm_head, Tile("head"), pytest.fail, model, pytest.fail)
    ids = torch.randint(0, vocabulary, (1, tokens))
    with Meter(model) as meter:
        model(input_ids=ids, labels=ids).loss.backward()
    undo()
    unit = 2 * tokens * hidden
    weight = 12 * hidden * vocabulary  # its gradient in fp32 and bf16, and on the CPU fp32 factors
    labels = 5 * 8 * tokens
    assert meter.peak_bytes < 7 * unit + weight + labels


class _Hidden(nn.Module):
    """A decoder that makes hidden states of nothing."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(512, hidden)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return BaseModelOutputWithPast(last_hidden_state=self.embed_tokens(input_ids))


def test_products_are_added_to_their_sum_without_a_copy_of_it() -> None:
    total, of_logits, hidden = torch.ones(7, 3), torch.rand(5, 7), torch.rand(5, 3)
    with torch.profiler.profile() as found:
        add_product(total, of_logits, hidden)
    assert "aten::copy_" not in {event.key for event in found.key_averages()}
    torch.testing.assert_close(total, 1 + of_logits.t() @ hidden)


def test_one_gradient_per_weight_and_backward_under_accumulation() -> None:
    model, calls = made("qwen2, tied"), []
    _, expected = run(model)
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda weight: calls.append(weight))
    with apply(model, TOKENS):
        model.zero_grad()
        for _ in range(3):
            (STEPS["labels"](model, *data()) / 3).backward()
    assert len(calls) == 3
    assert furthest(gradients(model), expected) < 1e-6


def test_backward_twice_through_one_graph() -> None:
    model = made()
    _, once = run(model)
    with apply(model, TOKENS):
        model.zero_grad()
        loss = STEPS["labels"](model, *data())
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert furthest(gradients(model), {name: 2 * one for name, one in once.items()}) < 1e-6


@pytest.mark.parametrize(
    "config",
    [
        TOKENS,
        {"tile_config": {"tile": [{"op_name": "feed_forward", "tokens": 8, "layers": True}]}},
        {"stream_config": {"tokens": 8}},
    ],
    ids=["loss", "module", "stream"],
)
def test_gradients_that_would_lack_a_part_are_an_error(config: dict[str, Any]) -> None:
    """A penalty on gradients differentiates them again, which would be silently wrong."""
    model = tiny_llama().train()
    ids = torch.randint(0, model.config.vocab_size, (2, LENGTH))
    with apply(model, config):
        loss = model(input_ids=ids, labels=ids).loss
        with pytest.raises(RuntimeError, match="create_graph=True: gradients of tiles and"):
            torch.autograd.grad(loss, [*model.parameters()], create_graph=True)


def test_logits_are_made_when_they_are_read() -> None:
    model = made("gemma2, softcapping")
    ids, labels = data()
    expected = model(input_ids=ids, labels=labels).logits.detach()
    with apply(model, TOKENS):
        logits = model(input_ids=ids, labels=labels).logits
        assert isinstance(logits, TiledLogits)
        assert logits.shape == expected.shape
        assert isinstance(logits.float().detach(), TiledLogits)
        assert "made when read" in repr(logits)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        assert logits.whole is None
        assert torch.equal(copy.deepcopy(logits.detach()), expected)
        assert torch.equal(torch.as_tensor(logits.detach().tolist()), expected)
        assert torch.equal(logits.detach() + 0, expected)
        assert (logits.detach().numpy() == expected.numpy()).all()


def test_a_loss_of_whole_logits_says_so_and_is_right(caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids).logits
        return (logits - logits.mean(1, keepdim=True)).pow(2).mean()  # mixes tokens

    model = made()
    loss, expected = run(model, step)
    with apply(model, TOKENS) as applied:
        caplog.clear()  # the plan itself was logged
        tiled_loss, found = run(model, step)
        run(model, step)
        (adjustment,) = applied.plan.adjustments
        assert [record.getMessage() for record in caplog.records] == [str(adjustment)]
    assert torch.equal(tiled_loss, loss)
    assert furthest(found, expected) < 1e-6
    assert adjustment.got == "whole logits"
    assert "aten.mean" in adjustment.reason


def test_a_forward_that_reads_the_heads_weight_itself_is_right_and_this_is_said() -> None:
    """As Liger's fused loss and TRL's trainers replace a model's forward."""
    model = made()
    own = model.forward

    def fused(input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(hidden @ model.lm_head.weight.t(), labels[:, 1:].flatten())
        return BaseModelOutputWithPast(last_hidden_state=loss)

    def step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=labels).last_hidden_state

    model.forward = fused
    loss, expected = run(model, step)
    with apply(model, TOKENS) as applied:
        for _ in range(2):
            found_loss, found = run(model, step)
        (adjustment,) = applied.plan.adjustments
    assert torch.equal(found_loss, loss)
    assert furthest(found, expected) == 0.0
    assert (adjustment.got, adjustment.reason) == ("no tiles", NOT_CALLED)
    model.forward = own
    with apply(model, TOKENS) as applied:
        run(model)
    assert not applied.plan.adjustments
    assert not model._forward_hooks


def test_writing_into_the_logits_is_right_or_raises() -> None:
    """As Chameleon does with the logits of image tokens."""

    def step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids).logits
        logits[:, :, 3:9] = -100.0
        return F.cross_entropy(logits.view(-1, VOCABULARY), ids.view(-1).clamp(max=2))

    model = made()
    loss, expected = run(model, step)
    with apply(model, TOKENS):
        tiled_loss, found = run(model, step)
        with pytest.raises(RuntimeError, match=r"tile_config\.loss: off"):
            model(input_ids=data()[0]).logits.div_(2)
    assert torch.equal(tiled_loss, loss)
    assert furthest(found, expected) < 1e-6


def test_a_leaf_made_of_logits_gets_its_own_gradient() -> None:
    model = made()
    with apply(model, TOKENS):
        logits = model(input_ids=data()[0]).logits.detach().requires_grad_()
        logits.logsumexp(-1).sum().backward()
    assert logits.grad.sum() == pytest.approx(2 * LENGTH, rel=1e-4)
    assert model.lm_head.weight.grad is None


def test_evaluation_and_generation() -> None:
    model = made().eval()
    ids, labels = data()
    with torch.no_grad():
        expected = model(input_ids=ids, labels=labels)
    text = model.generate(ids, max_new_tokens=5, do_sample=False)
    with apply(model, TOKENS) as applied:
        with torch.no_grad(), NoLogits():
            loss = model(input_ids=ids, labels=labels).loss
        with torch.inference_mode():
            assert torch.equal(model(input_ids=ids).logits.cpu(), expected.logits)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), text)
        assert not applied.plan.adjustments
    assert torch.equal(loss, expected.loss)


@pytest.mark.parametrize("case", ["case_3", "full_recompute", "select_recompute"])
def test_beside_swap_and_recomputation(case: str) -> None:
    model = tiny_llama()
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))

    def step(model: Any, *_: Any) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    loss, expected = run(model, step)
    config = load_config(CASES[case]).to_dict()
    with apply(model, {**config, "tile_config": {"loss": 4}, "memory": {"min_tensor_mib": 1e-6}}) as applied:
        for _ in range(4):  # the later ones by what was learned
            tiled_loss, found = run(model, step)
            assert torch.equal(tiled_loss, loss)
            assert furthest(found, expected) < 1e-6
        moved = applied.stats().offloaded_bytes
    assert (moved > 0) == (case == "case_3")


def test_remove_restores_the_head() -> None:
    model = made()
    before = dict(vars(model.lm_head))
    applied = apply(model, TOKENS)
    copied = copy.deepcopy(model)
    assert "forward" in vars(model.lm_head)
    with pytest.raises(PlanError, match="no plan on it yet"):
        apply(model, TOKENS)
    applied.suspend()
    assert type(model(input_ids=data()[0]).logits) is torch.Tensor
    applied.resume()
    applied.remove()
    assert dict(vars(model.lm_head)) == before
    assert type(model(input_ids=data()[0]).logits) is torch.Tensor
    assert type(copied(input_ids=data()[0]).logits) is torch.Tensor


def test_auto_leaves_small_batches_whole() -> None:
    assert auto_tokens(8192, 4096, 128_256) == 1024
    assert auto_tokens(131_072, 4096, 128_256) == 2092
    model = made()
    ids = torch.randint(1, VOCABULARY, (1, 1025))
    with apply(model, {"tile_config": {"loss": "auto"}}):
        assert type(model(input_ids=ids[:, :1024]).logits) is torch.Tensor
        assert isinstance(model(input_ids=ids).logits, TiledLogits)


def test_the_plan_says_it() -> None:
    shape = model_structure(made())
    for written, tile in (
        ("auto", Tile("head")),
        (8, Tile("head", tiles=8)),
        ({"tokens": 4096}, Tile("head", tokens=4096)),
    ):
        plan = resolve_plan(load_config({"tile_config": {"loss": written}}), shape)
        assert plan.tiles == (tile,)
        assert MemoryPlan.from_json(plan.to_json()) == plan
        assert str(tile) in plan_table(plan)
    assert "tiles" not in resolve_plan(load_config({"tile_config": {"loss": "off"}}), shape).to_json()
    assert load_config({"tile_config": {"loss": {"tokens": 3}}}).tile_config.loss == TileTokens(3)
    with pytest.raises(PlanError, match="above 0"):
        MemoryPlan.from_json(plan.to_json().replace("4096", "0"))
    with pytest.raises(PlanError, match="head"):
        apply(made(), MemoryPlan((), 2, tiles=(Tile("embedding", tokens=4),)))


@pytest.mark.parametrize("what", ["no head", "compiled whole"])
def test_what_cannot_be_tiled_is_rejected_by_name(what: str) -> None:
    model: Any = made()
    document: dict[str, Any] = {"tile_config": {"loss": 4}}
    if what == "compiled whole":
        model = torch.compile(model)
    shape = model_structure(model.model if what == "no head" else model)
    with pytest.raises(PlanError, match=r"tile_config\.loss: expected .*, found 4"):
        resolve_plan(load_config(document), shape)
    document["tile_config"]["loss"] = "auto"
    plan = resolve_plan(load_config(document), shape)
    assert plan.tiles == ()
    assert [asdict(item)["got"] for item in plan.adjustments] == ["off"]
