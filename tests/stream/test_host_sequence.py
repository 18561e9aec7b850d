"""What is on the host and when: copies ahead of use, in bytes by formula, device memory of one chunk."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actswap import PlanError, apply
from hf_actswap.engine import HostPool, Link, PageableSlabs, host_pool, record_saved
from hf_actswap.engine.host_pool import Blocks
from hf_actswap.engine.stats import Counters
from hf_actswap.plan import model_structure
from hf_actswap.stream import streamed_attention, traced
from hf_actswap.stream.host_sequence import (
    AttentionShapes,
    HostSequence,
    chunk_bounds,
    host_bytes,
    longest_on_host,
    passes,
)
from hf_actswap.stream.piecewise_attention import Visibility, attend, attend_backward
from hf_actswap.stream.two_passes import auto_tokens
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.simulated_transfer import Clock, SimulatedCopy, SimulatedTransfer
from tests.engine.test_tiled_loss import Meter
from tests.stream.streamed_models import LENGTH, PACKED, SIZES, STREAMED, TOKENS, data, furthest, made, step

CHUNKS = 4


def sequence(transfer: RecordingTransfer, room_bytes: int | None = None) -> tuple[HostSequence, HostPool]:
    pool = HostPool(PageableSlabs(), room_bytes, slab_bytes=1)
    return HostSequence(pool, transfer, Counters()), pool


def test_put_bring_and_put_again_in_the_order_of_the_transfers_contract() -> None:
    transfer = RecordingTransfer()
    host, pool = sequence(transfer)
    host.put("a", torch.arange(6.0).view(2, 3), torch.ones(4))
    assert "a" in host
    assert transfer.in_flight == 2, "nobody waits for a copy that has just been asked for"
    host.prefetch("a")
    host.prefetch("a")
    host.prefetch("of this there is nothing")
    assert transfer.in_flight == 4
    numbers, ones = host.fetch("a")
    assert torch.equal(numbers, torch.arange(6.0).view(2, 3))
    host.put("a", numbers + 1, ones + 1)
    numbers, ones = host.fetch("a")
    assert torch.equal(numbers, torch.arange(1.0, 7.0).view(2, 3))
    assert torch.equal(ones, torch.full((4,), 2.0))
    assert pool.used_bytes == 40
    host.drop("a")
    host.drop("a")
    assert pool.used_bytes == 0


def test_sources_are_held_until_their_copies_are_done_and_few_are() -> None:
    transfer = RecordingTransfer()
    host, _ = sequence(transfer)
    for number in range(7):
        host.put(number, torch.full((3,), float(number)))
    assert transfer.in_flight == 4, "compute has waited for the oldest"
    assert [float(host.fetch(number)[0][0]) for number in range(7)] == list(range(7))


def test_what_nobody_asks_for_any_more_is_waited_for_and_given_back() -> None:
    transfer = RecordingTransfer()
    host, pool = sequence(transfer)
    host.put("a", torch.ones(3))
    host.prefetch("a")
    host.put("b", torch.ones(3))
    del host
    gc.collect()
    assert transfer.in_flight == 0
    assert pool.used_bytes == 0


def test_no_room_is_an_error_that_says_what_to_do() -> None:
    host, pool = sequence(RecordingTransfer(), room_bytes=100)
    with pytest.raises(PlanError, match=r"Shorten the sequence, raise memory\.host_memory_gib"):
        host.put("a", torch.ones(20), torch.ones(20))
    host.close()
    assert pool.used_bytes == 0


def test_what_is_not_contiguous_is_named_and_nothing_is_taken() -> None:
    host, pool = sequence(RecordingTransfer())
    with pytest.raises(ValueError, match=r"for a: expected contiguous.*\[3, 2\] with strides \[1, 3\]"):
        host.put("a", torch.ones(4), torch.ones(2, 3).t())
    assert "a" not in host
    assert pool.used_bytes == 0


def as_flash_leaves_it(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend` returns, with the output in the memory layout (batch, tokens, heads, size)."""
    out, total = attend(*given)
    return out.transpose(1, 2).contiguous().transpose(1, 2), total


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("family", ["llama", "gemma2, windows and softcapping", "llama4, blocks"])
def test_flash_attentions_layout_in_blocks_of_several_pieces(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = made(family), {"stream_config": {"tokens": 32}}
    with pytest.MonkeyPatch.context() as patch:  # one piece of each block
        patch.setattr(host_pool, "Blocks", lambda _: Blocks(32 * host_pool.MIB))
        with apply(model, config):
            loss, expected = step(model)
    monkeypatch.setattr(streamed_attention, "attend", as_flash_leaves_it)
    with apply(model, config):
        in_pieces, found = step(model)
    assert torch.equal(in_pieces, loss)
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("family", ["llama", "gemma3, windows", "llama4, blocks"])
def test_copies_that_finish_at_the_last_moment_give_the_same_bits(family: str) -> None:
    model, transfer = made(family), RecordingTransfer()
    with apply(model, STREAMED):
        loss, expected = step(model)
    with apply(model, STREAMED, transfer=transfer) as applied:
        late_loss, found = step(model)
        assert applied.stats().host_bytes == 0
    assert torch.equal(late_loss, loss)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert transfer.in_flight == 0


def test_pieces_are_on_their_way_before_they_are_needed() -> None:
    model, transfer = made(), RecordingTransfer()
    with apply(model, STREAMED, transfer=transfer):
        step(model)
    place = {event: number for number, event in enumerate(transfer.events)}
    copies = sum(event.startswith("in") and event.endswith("start") for event in transfer.events)
    ahead = [
        number
        for number in range(copies)
        if any(
            event.endswith("start") and event.startswith("in")
            for event in transfer.events[place[f"in {number} start"] + 1 : place[f"in {number} wait"]]
        )
        or place[f"in {number} wait"] - place[f"in {number} start"] > 1
    ]
    assert len(ahead) > 0.9 * copies


def test_no_copy_starts_only_when_it_is_needed() -> None:
    model = made()
    with apply(model, STREAMED) as applied:
        step(model)
        stats = applied.stats()
    assert stats.late_prefetches == 0
    assert stats.prefetches > 100


class TimedTransfer(SimulatedTransfer):
    """Notes of each copy how long compute waited for it, in ms."""

    overlaps = False  # nor is host memory page-locked here

    def __init__(self, clock: Clock, link: Link) -> None:
        super().__init__(clock, link)
        self.waited_ms: dict[str, list[float]] = {"out": [], "in": []}

    def offload(self, source: torch.Tensor, host: Any) -> Any:
        return self._noted("out", super().offload(source, host))

    def reload(self, host: Any, after: Any) -> Any:
        block, copy = super().reload(host, after)
        return block, self._noted("in", copy)

    def _noted(self, way: str, copy: SimulatedCopy) -> SimulatedCopy:
        wait, place = copy.wait, len(self.waited_ms[way])
        self.waited_ms[way].append(0.0)

        def noted() -> Any:
            waited = wait()
            self.waited_ms[way][place] = waited.elapsed_ms() if waited else 0.0
            return waited

        copy.wait = noted  # type: ignore[method-assign]
        return copy


def waits_of_a_step(
    share: float, tflops: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, list[float]], float]:
    """Waits for each copy of a step in a share of ``auto``'s tokens, at a rate of attention in TFLOP/s.

    A model with 4 heads, 1 key head and chunks of 64 tokens stands for Llama-3-8B on an H200: products of
    attention take as much longer as its chunks are shorter; linear layers, and what a copy takes beside its
    bytes, are as long as there in relation to a copy of attention's output.

    Returns:
        The waits in ms, by direction, and the time of the step.
    """
    tokens, auto, clock = 64, auto_tokens(4, 1), Clock()
    small = 4 * (8 * 2 + 4) / (32 * (128 * 2 + 4))  # attention's output of a token, to that of the 8B model
    linear_ms = tokens * small * 2 * 218e6 / 660e9  # of a layer's weights
    link = Link(*[50e6] * 4, latency_ms=0.02 * small * tokens / auto)
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_key_value_heads": 1})
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = torch.randint(3, 100, (1, 6 * tokens))

    def timed(run: Any, flop: int) -> Any:
        def call(*given: Any) -> Any:
            queries, keys = given[-2:]
            pairs = len(queries) * len(keys) / (2 if queries == keys else 1)
            clock.advance(flop * pairs * share * auto / tokens / (tflops * 1e9))
            return run(*given)

        return call

    def linear(_module: Any, _args: Any, output: torch.Tensor) -> None:
        clock.advance(linear_ms)
        if output.requires_grad:
            output.register_hook(lambda _: clock.advance(2 * linear_ms))

    trace, transfer = AttentionShapes(Visibility(), 4, 1, 8, 8, 2, 4, 4), TimedTransfer(clock, link)
    with (
        monkeypatch.context() as patched,
        apply(model, {"stream_config": {"tokens": tokens}}, transfer=transfer),
    ):
        patched.setattr(streamed_attention, "attend", timed(attend, trace.forward_flop))
        patched.setattr(streamed_attention, "attend_backward", timed(attend_backward, trace.backward_flop))
        for layer in model.model.layers:
            layer.mlp.up_proj.register_forward_hook(linear)
        model(input_ids=ids, labels=ids).loss.backward()
    return transfer.waited_ms, clock.now_ms


@pytest.mark.slow
@pytest.mark.parametrize("tflops", [450, 545])
def test_in_chunks_of_auto_every_copy_is_there_before_its_use(
    tflops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the first of each pass, ahead of which nothing is computed, and the last that leave."""
    waits, step_ms = waits_of_a_step(1.0, tflops, monkeypatch)
    late = [number for number, waited in enumerate(waits["in"]) if waited]
    first = 2 * 3 * (5 + 4 + 3 + 2 + 1)  # keys and values of the pieces of three layers in the first pass
    assert set(late) <= {0, 1, first, first + 1}
    assert all(number >= len(waits["out"]) - 4 for number, waited in enumerate(waits["out"]) if waited)
    assert sum(waits["in"]) + sum(waits["out"]) < 0.006 * step_ms
    short, short_ms = waits_of_a_step(0.1, tflops, monkeypatch)
    assert sum(waited > 0 for waited in short["in"]) > 100
    assert sum(short["in"]) > 0.1 * short_ms


def test_copied_bytes_and_host_memory_by_formula() -> None:
    model, layers, rows = made(), SIZES["num_hidden_layers"], 2
    of_keys = rows * 2 * (2 * 8) * 4  # of a token: keys and values, key heads times their size, fp32
    of_output = rows * (32 * 4 + 4 * 4)  # hidden size, and a log-sum-exp for each head
    chunks = [TOKENS, TOKENS, TOKENS, LENGTH - 3 * TOKENS]
    earlier = sum(sum(chunks[:number]) for number in range(CHUNKS))  # tokens of all pieces
    with apply(model, STREAMED) as applied:
        step(model)
        stats = applied.stats()
    kept = sum(chunks[:-1])
    first_out = kept * of_keys + LENGTH * of_output
    first_in = earlier * of_keys
    second_out = earlier * of_keys  # gradients in fp32, as large as the keys here
    second_in = 2 * LENGTH * of_output + earlier * of_keys  # of each layer once more for its recomputation
    second_in += (earlier - kept) * of_keys + kept * of_keys  # to be added to, and at last their own
    assert stats.offloaded_bytes == layers * (first_out + second_out)
    assert stats.prefetched_bytes == layers * (first_in + second_in)
    assert stats.host_peak_bytes == layers * (kept * 2 * of_keys + LENGTH * of_output)


def test_gradients_summed_in_bf16_take_half_and_round() -> None:
    model, layers, found = made(), SIZES["num_hidden_layers"], {}
    peaks = []
    for dtype in ("fp32", "bf16"):
        with apply(model, {"stream_config": {"tokens": TOKENS, "grad_accum_dtype": dtype}}) as applied:
            found[dtype] = step(model)[1]
            peaks.append(applied.stats().host_peak_bytes)
    of_keys, kept = 2 * 2 * (2 * 8) * 4, 48
    assert peaks[0] - peaks[1] == layers * kept * of_keys // 2
    assert 1e-5 < furthest(found["bf16"], found["fp32"]) < 2**-8


def test_a_list_says_which_layers_are_recomputed_and_the_others_are_kept() -> None:
    """The output of the attention of a layer that is kept comes back once."""
    model = made()
    with apply(model, STREAMED) as applied:
        loss, expected = step(model)
        all_again = applied.stats()
    with apply(model, {**STREAMED, "recompute_config": {"recompute": [1]}}) as applied:
        kept_loss, found = step(model)
        stats = applied.stats()
        assert [applied.plan.fate(layer) for layer in range(3)] == ["recompute", "keep", "keep"]
    assert torch.equal(kept_loss, loss)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert stats.late_prefetches == stats.host_bytes == 0
    trace = AttentionShapes(Visibility(), 2 * 4, 2 * 2, 8, 8, 4, 4, 4)
    first, second = passes([trace, *[replace(trace, again=False)] * 2], chunk_bounds(LENGTH, TOKENS))
    assert stats.prefetched_bytes == first.in_bytes + second.in_bytes
    assert all_again.prefetched_bytes - stats.prefetched_bytes == 2 * LENGTH * trace.output_bytes


def test_windows_keep_and_bring_only_what_is_seen() -> None:
    model, rows = made("mistral, windows over chunks"), 2  # window 23
    of_keys = rows * 2 * (2 * 8) * 4
    with apply(model, {"stream_config": {"tokens": 4}}) as applied, torch.enable_grad():
        loss = model(**data()).loss
        stats = applied.stats()
        del loss
    seen = [min(number, -(-(23 - 1) // 4)) for number in range(13)]  # whole chunks within 22 tokens
    assert stats.prefetched_bytes == 3 * sum(seen) * 4 * of_keys
    model = made("gemma3, windows")  # window 11 in two of three layers, within a chunk of 16
    with apply(model, STREAMED) as applied:
        model(**data())
        stats = applied.stats()
    assert stats.prefetched_bytes == (2 * 3 * 10 + (3 + 2 + 1) * 16) * of_keys


def test_keys_of_finished_documents_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 3, 21, 8, 1 and 17 tokens, in chunks of 16: the second and the last cross a border."""
    model, layers, rows = made(), SIZES["num_hidden_layers"], 2
    predicted: list[int] = []
    monkeypatch.setattr(
        HostSequence, "make_ready", lambda _, size_bytes, longest: predicted.append(size_bytes)
    )
    of_keys, of_output = rows * 2 * (2 * 8) * 4, rows * (32 * 4 + 4 * 4)
    with apply(model, STREAMED) as applied:
        step(model, position_ids=PACKED[None])
        stats = applied.stats()
    left = (16 - 3) + 0 + (48 - 33)  # behind the first chunk, the second (a document begins at 32), the third
    assert stats.offloaded_bytes == layers * (2 * left * of_keys + LENGTH * of_output)
    assert stats.prefetched_bytes == layers * (3 * left * of_keys + 2 * LENGTH * of_output)
    assert stats.host_peak_bytes == predicted[-1], "after that of the few tokens that are checked"
    whole = layers * (48 * 2 * of_keys + LENGTH * of_output)  # test_copied_bytes_and_host_memory_by_formula
    assert stats.host_peak_bytes < 0.8 * whole


@pytest.mark.parametrize(("tokens", "dtype"), [(4, "fp32"), (TOKENS, "fp32"), (TOKENS, "bf16")])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3, windows", "mistral, windows over chunks", "llama4, blocks"]
)
def test_host_memory_and_copies_are_predicted_to_the_byte(
    family: str, tokens: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted: list[int] = []
    monkeypatch.setattr(
        HostSequence, "make_ready", lambda _, size_bytes, longest: predicted.append(size_bytes)
    )
    model = made(family)
    with apply(model, {"stream_config": {"tokens": tokens, "grad_accum_dtype": dtype}}) as applied:
        step(model)
        stats = applied.stats()
    assert stats.host_peak_bytes == predicted[-1], "after that of the few tokens that are checked"
    if "blocks" in family:
        return  # its mask cannot be told on fake tensors
    with traced(model, TOKENS, dtype) as layers:
        record_saved(model, model_structure(model), kwargs=data(TOKENS))
    first, second = passes(layers.values(), chunk_bounds(LENGTH, tokens))
    assert host_bytes(layers.values(), chunk_bounds(LENGTH, tokens)) == predicted[-1]
    assert stats.offloaded_bytes == first.out_bytes + second.out_bytes
    assert stats.prefetched_bytes == first.in_bytes + second.in_bytes


@pytest.mark.parametrize("most_bytes", [0, 1000, 54_321, 10**6, 10**7])
def test_the_longest_on_the_host_fits_and_one_token_more_does_not(most_bytes: int) -> None:
    layers = [
        AttentionShapes(visible, 4, 2, 8, 8, 2, 4, 4)
        for visible in (Visibility(), Visibility(window=300), Visibility(block=512))
    ]
    longest = longest_on_host(layers, 100, most_bytes, 10**7)
    assert host_bytes(layers, chunk_bounds(longest + 1, 100)) > most_bytes
    assert not longest or host_bytes(layers, chunk_bounds(longest, 100)) <= most_bytes


def test_a_sequence_that_does_not_fit_on_the_host_is_an_error_before_any_gradient() -> None:
    model = made()
    fits = {name: item[:, : LENGTH - 1] for name, item in data().items()}
    with apply(model, STREAMED) as applied:
        model(**fits).loss.backward()
        most_bytes = applied.stats().host_peak_bytes
    model.zero_grad()
    with apply(model, {**STREAMED, "memory": {"host_memory_gib": most_bytes / 2**30}}) as applied:
        found = rf"GiB needed, and this rank may take .* GiB, enough for {LENGTH - 1} tokens"
        with pytest.raises(PlanError, match=found):
            model(**data())
        assert applied.stats().host_bytes == 0
        assert all(item.grad is None for item in model.parameters())
        model(**fits).loss.backward()


def test_a_graph_without_backward_frees_the_host_and_a_second_backward_raises() -> None:
    model = made()
    with apply(model, STREAMED) as applied:
        step(model)
        loss = model(**data()).loss
        assert applied.stats().host_bytes > 0
        del loss
        assert applied.stats().host_bytes == 0
        loss = model(**data()).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward ran twice"):
            loss.backward()


class DeviceMeter(Meter):
    """Counts all but host memory, which is made as bytes (as random states are)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in tree_leaves(out):
            if type(item) is torch.Tensor and not item.is_meta:
                storage = item.untyped_storage()
                if item.dtype is torch.uint8 and storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    weakref.finalize(storage, self._gone, storage._cdata, 0)
                self._count(storage)
        return out


def device_peak(layers: int, length: int, **sizes: Any) -> int:
    """Return the peak bytes of a streamed step in chunks of 64 tokens, with gradients allocated before."""
    hidden = {"hidden_size": 64, "intermediate_size": 224, "vocab_size": 50, "num_hidden_layers": layers}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **hidden, **sizes})).to(torch.bfloat16).train()
    for item in model.parameters():
        item.grad = torch.zeros_like(item)
    ids = torch.randint(3, 50, (1, length))
    with apply(model, {"stream_config": {"tokens": 64}}), DeviceMeter(model) as meter:
        model(input_ids=ids[:, :65], labels=ids[:, :65]).loss.backward()
        meter.peak_bytes = 0
        model(input_ids=ids, labels=ids).loss.backward()
    return meter.peak_bytes


@pytest.mark.parametrize("numbers", [(2, 8), pytest.param((2, 32), marks=pytest.mark.slow)])
def test_device_memory_does_not_grow_with_the_sequence(numbers: tuple[int, int]) -> None:
    slopes = {}
    for layers in numbers:
        short, long = device_peak(layers, 192), device_peak(layers, 384)
        slopes[layers] = (long - short) / 192
    assert slopes[2] == slopes[numbers[1]]
    assert 2 * 8 <= slopes[2] <= 4 * 8, "ids, labels and positions; a hidden state has 128 bytes"
