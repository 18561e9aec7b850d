"""The documents' own YAML loads as it is pasted, and means what they say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hf_actswap.config import (
    ActSwapConfig,
    LayerSwapRule,
    OpSwapRule,
    ParallelConfig,
    RecomputeConfig,
    SwapConfig,
    load_config,
)

CASE = """\
context:
  memory_optimize_level: "O0"
model:
  model_config:
    num_layers: 4
recompute_config:
  recompute: False
  select_recompute: False
  select_comm_recompute: False
swap_config:
  swap: True
"""

CASE_1 = CASE + "  default_prefetch: 10\n"

CASE_2 = (
    CASE
    + """\
  layer_swap:
    - backward_prefetch: 20
      layers: [0,3]
"""
)

CASE_3 = (
    CASE
    + """\
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
)

CASE_4 = CASE_3.replace(
    "  select_recompute: False\n",
    "  select_recompute:\n    'feed_forward': [0,3]\n",
)

# The Memory Optimization document, its indentation restored where the text version of the page lost it.
DEEPSEEK = """\
# recompute config
recompute_config:
  recompute: [3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 0]
  select_recompute: False
  parallel_optimizer_comm_recompute: True
  mp_comm_recompute: True
  recompute_slice_activation: True
"""

LAYERS_48 = r"""
# recompute config
recompute_config:
  recompute: [[2,1,0,0,0],[1,0,0,0,0]]
  select_recompute:
    'feed_forward\.w1\.activation\.silu': True
    'feed_forward\.mul': True
    'feed_forward\.w1\.matmul': [[1,0,0,0,0],[2,1,0,0,0]]
    'feed_forward\.w3\.matmul': [2,1,0,0,0]
  select_comm_recompute: ['ffn_norm\.norm','attention_norm\.norm']
"""

LAYERS_48_LAYOUT = """
model:
  model_config:
    num_layers: 48
    offset: [[0,1,1,1,1],[1,1,1,1,0]]
    pp_interleave_num: 2
parallel_config:
  pipeline_stage: 5
"""

SCALAR_CONTEXT_LINE = "context: memory_optimize_level=O0\n"

SCALAR_CONTEXT_BLOCK = """\
context:
  memory_optimize_level=O0
"""

KEEPS_GATHERED = RecomputeConfig(select_comm_recompute=False)
"""False is not the same as nothing: where nothing is written, parallel layers gather again."""

ATTENTION_RULES = (
    OpSwapRule("attention", 20, (0, 1, 2)),
    OpSwapRule("attention", 10, (3,)),
    OpSwapRule("feed_forward", 15, (1, 2)),
)

RECOMPUTE_48 = RecomputeConfig(
    recompute=((2, 1, 0, 0, 0), (1, 0, 0, 0, 0)),
    select_recompute={
        r"feed_forward\.w1\.activation\.silu": True,
        r"feed_forward\.mul": True,
        r"feed_forward\.w1\.matmul": ((1, 0, 0, 0, 0), (2, 1, 0, 0, 0)),
        r"feed_forward\.w3\.matmul": (2, 1, 0, 0, 0),
    },
    select_comm_recompute=(r"ffn_norm\.norm", r"attention_norm\.norm"),
)

PARALLEL_48 = ParallelConfig(pipeline_stage=5, pp_interleave_num=2, offset=((0, 1, 1, 1, 1), (1, 1, 1, 1, 0)))


@pytest.mark.parametrize(
    ("document", "config"),
    [
        pytest.param(
            CASE_1,
            ActSwapConfig(
                swap_config=SwapConfig(swap=True, default_prefetch=10),
                recompute_config=KEEPS_GATHERED,
                num_layers=4,
            ),
            id="case 1",
        ),
        pytest.param(
            CASE_2,
            ActSwapConfig(
                swap_config=SwapConfig(swap=True, layer_swap=(LayerSwapRule(20, (0, 3)),)),
                recompute_config=KEEPS_GATHERED,
                num_layers=4,
            ),
            id="case 2",
        ),
        pytest.param(
            CASE_3,
            ActSwapConfig(
                swap_config=SwapConfig(swap=True, op_swap=ATTENTION_RULES),
                recompute_config=KEEPS_GATHERED,
                num_layers=4,
            ),
            id="case 3",
        ),
        pytest.param(
            CASE_4,
            ActSwapConfig(
                swap_config=SwapConfig(swap=True, op_swap=ATTENTION_RULES),
                recompute_config=replace(KEEPS_GATHERED, select_recompute={"feed_forward": (0, 3)}),
                num_layers=4,
            ),
            id="case 4",
        ),
        pytest.param(
            DEEPSEEK,
            ActSwapConfig(
                recompute_config=RecomputeConfig(
                    recompute=(3, *[4] * 12, 3, 2, 0),
                    parallel_optimizer_comm_recompute=True,
                    recompute_slice_activation=True,
                )
            ),
            id="16 stages",
        ),
        pytest.param(LAYERS_48, ActSwapConfig(recompute_config=RECOMPUTE_48), id="48 layers, fragment"),
        pytest.param(
            LAYERS_48 + LAYERS_48_LAYOUT,
            ActSwapConfig(recompute_config=RECOMPUTE_48, parallel_config=PARALLEL_48, num_layers=48),
            id="48 layers, with layout",
        ),
        pytest.param(SCALAR_CONTEXT_LINE, ActSwapConfig(), id="context on one line"),
        pytest.param(SCALAR_CONTEXT_BLOCK, ActSwapConfig(), id="context as a scalar below"),
    ],
)
def test_documents_mean_what_they_say(document: str, config: ActSwapConfig, tmp_path: Path) -> None:
    assert repr(load_config(document)).split(", notes=")[0] == repr(config).split(", notes=")[0]
    file = tmp_path / "pasted.yaml"
    file.write_text(document)
    assert load_config(file) == config
    assert load_config(str(file)).source == str(file)


def test_every_block_of_the_swap_document() -> None:
    seed = Path(__file__).parents[3] / "shared/seeds/mindformers_fine_grained_activations_swap.txt"
    if not seed.exists():
        pytest.skip(f"the document itself is not beside this repository ({seed.name})")
    blocks = re.findall(r"^ *```yaml\n(.*?)^ *```", seed.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    loaded = [load_config(block) for block in blocks]
    assert loaded == [load_config(text) for text in (SCALAR_CONTEXT_BLOCK, CASE_1, CASE_2, CASE_3, CASE_4)]


CONTEXT_NOTE = "`context` has no meaning here and is ignored."
MODEL_NOTE = "`model`: num_layers is checked against the model; the rest is ignored."


@pytest.mark.parametrize(
    ("document", "notes"),
    [
        (CASE_1, (CONTEXT_NOTE, MODEL_NOTE)),
        (SCALAR_CONTEXT_LINE, (CONTEXT_NOTE,)),
        (DEEPSEEK, ()),
        (
            LAYERS_48_LAYOUT,
            (
                "`model`: num_layers is checked against the model; "
                "offset and pp_interleave_num go to parallel_config; the rest is ignored.",
            ),
        ),
        (
            "model: {model_config: {offset: 0}}\n",
            (
                "`model`: num_layers is checked against the model; "
                "offset goes to parallel_config; the rest is ignored.",
            ),
        ),
        (
            "seed: 0\noutput_dir: './output'\nprofile_start_step: 1\ncallbacks: [{type: MFLossMonitor}]\n",
            tuple(
                f"`{key}` has no meaning here and is ignored."
                for key in ("seed", "output_dir", "profile_start_step", "callbacks")
            ),
        ),
        (
            "parallel: {parallel_mode: 1}\n"
            "parallel_config: {data_parallel: 8, model_parallel: 1, vocab_emb_dp: true}\n",
            (
                "`parallel` has no meaning here and is ignored.",
                "`parallel_config.data_parallel` has no meaning here and is ignored.",
                "`parallel_config.vocab_emb_dp` has no meaning here and is ignored.",
            ),
        ),
        (
            "parallel: {pipeline_config: {pipeline_interleave: false}}\n",
            ("`parallel`: pipeline_interleave is false, so pp_interleave_num is 1; the rest is ignored.",),
        ),
        (
            "parallel: {pipeline_config: {pipeline_interleave: true}}\n",
            ("`parallel`: pipeline_interleave is honoured; the rest is ignored.",),
        ),
    ],
)
def test_one_note_for_each_key_without_meaning(document: str, notes: tuple[str, ...]) -> None:
    assert load_config(document).notes == notes


@pytest.mark.parametrize(
    ("document", "parallel"),
    [
        ("parallel_config: {tensor_parallel_size: 2}\n", ParallelConfig(tensor_parallel_size=2)),
        ("parallel_config: {tensor_model_parallel_size: 2}\n", ParallelConfig(tensor_parallel_size=2)),
        ("parallel_config: {model_parallel: 2}\n", ParallelConfig(tensor_parallel_size=2)),
        (
            "parallel_config: {model_parallel: 2, tensor_parallel_size: 2}\n",
            ParallelConfig(tensor_parallel_size=2),
        ),
        ("parallel_config: {sequence_parallel: true}\n", ParallelConfig(sequence_parallel_enabled=True)),
        ("parallel_config: {use_seq_parallel: true}\n", ParallelConfig(sequence_parallel_enabled=True)),
        ("parallel_config: {offset: -1}\n", ParallelConfig(offset=-1)),
        (
            "parallel_config: {pipeline_stage: 3, offset: [1, -2, 1]}\n",
            ParallelConfig(pipeline_stage=3, offset=(1, -2, 1)),
        ),
        (
            "model: {model_config: {pp_interleave_num: 2}}\nparallel_config: {pp_interleave_num: 2}\n",
            ParallelConfig(pp_interleave_num=2),
        ),
        (
            "parallel: {pipeline_config: {pipeline_interleave: true}}\n"
            "parallel_config: {pp_interleave_num: 2}\n",
            ParallelConfig(pp_interleave_num=2),
        ),
        # vector R18: interleaving is off whatever the number says, so a table has one row
        (
            "parallel: {pipeline_config: {pipeline_interleave: false}}\n"
            "parallel_config: {pipeline_stage: 2, pp_interleave_num: 2}\n"
            "recompute_config: {recompute: [[1, 1]]}\n",
            ParallelConfig(pipeline_stage=2),
        ),
    ],
)
def test_spellings_of_the_parallel_section(document: str, parallel: ParallelConfig) -> None:
    assert load_config(document).parallel_config == parallel
