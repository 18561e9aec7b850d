"""What each process of the tensor axis's test counts: small patched Llamas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.parallel_peer import Collectives
from hf_actswap.config import ParallelConfig
from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
from hf_actswap.parallel.patch_model import patch_model
from tests.planner.tensor_axis_formulas import Llama, Setting
from tests.processes import run_cases

RANKS, BATCH, LENGTH = 2, 2, 16
TOKENS = BATCH * LENGTH
MODEL = Llama(hidden=32, inner=48, layers=2, heads=4, kv_heads=2, head_size=8, vocabulary=97)
ONE_KV_HEAD = Llama(hidden=32, inner=48, layers=2, heads=4, kv_heads=1, head_size=8, vocabulary=97)


@dataclass(frozen=True)
class Case:
    """A model, and how it is divided."""

    model: Llama
    setting: Setting


def case(model: Llama, dtype: torch.dtype, sequence_parallel: bool, reduces_in_float32: bool = True) -> Case:
    """Return the case of a dtype."""
    size = dtype.itemsize
    reduce_bytes = torch.float32.itemsize if reduces_in_float32 else size
    return Case(model, Setting(RANKS, sequence_parallel, TOKENS, size, reduce_bytes))


CASES = {
    "float32": case(MODEL, torch.float32, True),
    "float32_replicated": case(MODEL, torch.float32, False),
    "bfloat16": case(MODEL, torch.bfloat16, True),
    "bfloat16_replicated": case(MODEL, torch.bfloat16, False),
    "bfloat16_sums_in_bfloat16": case(MODEL, torch.bfloat16, True, False),
    "one_kv_head": case(ONE_KV_HEAD, torch.float32, True),
}


def count(of: Case, group: dist.ProcessGroup | None) -> dict[tuple[str, str], int]:
    """Run one step; return the bytes of this rank's collectives, by phase and kind."""
    setting = of.setting
    model = _model(of.model, setting)
    config = ParallelConfig(tensor_parallel_size=RANKS, sequence_parallel_enabled=setting.sequence_parallel)
    lean = setting.reduce_bytes == setting.size_bytes
    patch_model(model, config, group, reduce_dtype=None if lean else torch.float32)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, of.model.vocabulary, (BATCH, LENGTH), generator=generator)
    seen = Collectives()
    with seen.telling_regathers(), seen:
        loss = model(input_ids=ids, labels=ids).loss
        seen.phase = "backward"
        loss.backward()
        seen.phase = "after backward"
        allreduce_sequence_parallel_gradients(model, group)
    return dict(seen.whole_bytes)


def _model(sizes: Llama, setting: Setting) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_size,
        use_cache=False,
    )
    dtype = torch.float32 if setting.size_bytes == torch.float32.itemsize else torch.bfloat16
    return LlamaForCausalLM(config).to(dtype).train()


def run_on_rank(rank: int, folder: str) -> None:
    """Count all cases."""
    cases = {name: partial(count, of) for name, of in CASES.items()}
    run_cases(rank, folder, RANKS, cases, {name: [list(range(RANKS))] for name in cases})
