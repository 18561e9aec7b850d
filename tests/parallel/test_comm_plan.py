"""What a plan says about communication; one process, with a group that only says how large it is."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from hf_actswap import MemoryPlan, PlanError, apply, load_config, model_structure, resolve_plan
from hf_actswap.engine import install
from hf_actswap.parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    tensor_parallel_group,
)
from hf_actswap.plan import ModelStructure, PlanRow
from tests.engine.tiny_models import NUM_LAYERS, plan_of, tiny_llama
from tests.parallel.parallel_llama import parallel_llama

GATHERS = ("input_layernorm.all_gather", "post_attention_layernorm.all_gather")
REDUCTIONS = ("self_attn.o_proj.reduce_scatter", "mlp.down_proj.reduce_scatter")
LAYERS = range(NUM_LAYERS)


class _Group:
    """A group of which nobody is asked for anything."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def group_of(size: int) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, _Group(size))


@pytest.fixture(scope="module")
def shape() -> ModelStructure:
    """Of sequence-parallel layers, recorded without a collective."""
    return model_structure(parallel_llama(group_of(2), sequence_parallel=True))


@pytest.fixture(scope="module")
def replicated() -> ModelStructure:
    return model_structure(parallel_llama(group_of(2), sequence_parallel=False))


def plan(
    shape: ModelStructure, sequence_parallel: bool = True, size: int = 2, **recompute: Any
) -> MemoryPlan:
    parallel = {"tensor_parallel_size": size, "sequence_parallel_enabled": sequence_parallel}
    return resolve_plan(load_config({"recompute_config": recompute, "parallel_config": parallel}), shape)


def fates(found: MemoryPlan, fate: str) -> set[tuple[Any, str]]:
    return {(row.scope, row.op_path) for row in found.rows if row.fate == fate}


def on_all(*paths: str) -> set[tuple[Any, str]]:
    return {(layer, path) for layer in LAYERS for path in paths}


def test_communications_are_ops_of_the_module_in_which_they_run(
    shape: ModelStructure, replicated: ModelStructure
) -> None:
    assert shape.functions_known
    assert shape.layers[1].communications == (GATHERS[0], REDUCTIONS[0], GATHERS[1], REDUCTIONS[1])
    reductions = ("self_attn.o_proj.all_reduce", "mlp.down_proj.all_reduce")
    assert replicated.layers[1].communications == reductions
    assert not model_structure(tiny_llama()).communicates


def test_a_communication_stands_beside_the_op_that_it_reads(shape: ModelStructure) -> None:
    layer = shape.layers[0]
    assert layer.communications_beside("input_layernorm") == GATHERS[:1]
    assert layer.communications_beside("mlp.down_proj.linear") == REDUCTIONS[1:]
    assert layer.communications_beside("mlp") == REDUCTIONS[1:]
    assert layer.communications_beside("self_attn.q_proj") == ()


def test_select_comm_recompute_gathers_again(shape: ModelStructure) -> None:
    for names in (True, [r".*\.norm"], ["input_layernorm", "post_attention_layernorm"], list(GATHERS)):
        found = plan(shape, select_comm_recompute=names)
        assert fates(found, "re-gather") == on_all(*GATHERS)
        assert found.adjustments == ()
        assert found.unsupported == ()


def test_layers_that_a_written_selection_leaves_out_keep_what_they_gather(shape: ModelStructure) -> None:
    every = tuple(LAYERS)
    for written, kept in ((False, every), ([], every), ([1], every[1:]), (True, ()), ([r".*\.norm"], ())):
        found = plan(shape, select_comm_recompute=written)
        assert found.keeps_gathered == kept
        assert found.adjustments == ()
    assert plan(shape).keeps_gathered == ()
    assert plan(shape, sequence_parallel=False, select_comm_recompute=False).keeps_gathered == ()


def test_a_planner_gathers_again_whatever_is_written(shape: ModelStructure) -> None:
    document = {
        "recompute_config": {"select_comm_recompute": False},
        "parallel_config": {"tensor_parallel_size": 2, "sequence_parallel_enabled": True},
        "memory": {"mode": "smart_swap"},
    }
    found = resolve_plan(load_config(document), shape)
    assert found.keeps_gathered == ()
    assert "select_comm_recompute: asked what is gathered is kept, got no effect" in str(found.adjustments[0])


def test_a_reduction_is_done_again_where_what_it_reduces_is_rebuilt(shape: ModelStructure) -> None:
    """Else the plan would hold more than it drops."""
    wo = r"attention\.wo\.matmul"
    assert fates(plan(shape, select_comm_recompute=[wo]), "re-gather") == set()
    found = plan(shape, select_recompute=[wo], select_comm_recompute=[wo])
    assert fates(found, "re-gather") == on_all(REDUCTIONS[0])


def test_full_recomputation_beats_selection(shape: ModelStructure) -> None:
    found = plan(shape, recompute=True, select_comm_recompute=True)
    assert fates(found, "re-gather") == set()
    assert all(found.fate(layer, path) == "recompute" for layer, path in on_all(*GATHERS, *REDUCTIONS))


def test_mp_comm_recompute_keeps_all_results(shape: ModelStructure) -> None:
    found = plan(shape, recompute=[2], mp_comm_recompute=False)
    kept = {(layer, path) for layer in (0, 1) for path in (*GATHERS, *REDUCTIONS)}
    assert {(layer, path) for layer, path in fates(found, "keep") if path != "output"} == kept


def test_requests_that_find_nothing(shape: ModelStructure) -> None:
    found = plan(
        shape,
        sequence_parallel=False,
        mp_comm_recompute=False,
        recompute_slice_activation=True,
        select_comm_recompute=[r"attention\.wq"],
        select_comm_recompute_exclude=[r"attention\.wk"],
    )
    assert [str(adjustment) for adjustment in found.adjustments] == [
        r"recompute_config.select_comm_recompute attention\.wq, layers 0-3: asked recompute communication, "
        "got no effect: no communication stands beside what it names",
        r"recompute_config.select_comm_recompute_exclude attention\.wk: asked keep communication, "
        "got no effect: nothing that it names is communicated again",
        "recompute_config.mp_comm_recompute: asked false, got no effect: no recomputed layer communicates",
        "recompute_config.recompute_slice_activation: asked slices, got no effect: "
        "no layer is recomputed whole",
    ]


def test_slices_are_what_the_layer_before_hands_on(replicated: ModelStructure) -> None:
    found = plan(replicated, sequence_parallel=False, recompute=[3], recompute_slice_activation=True)
    assert fates(found, "slice") == {("embedding", "output"), (0, "output"), (1, "output")}
    assert found.adjustments == ()


def test_slices_give_way_to_a_swapped_input(replicated: ModelStructure) -> None:
    document = {
        "swap_config": {"swap": True, "op_swap": [], "recompute_input": [0, 2]},
        "recompute_config": {"recompute": [0, 1, 2], "recompute_slice_activation": True},
        "parallel_config": {"tensor_parallel_size": 2},
    }
    found = resolve_plan(load_config(document), replicated)
    assert fates(found, "slice") == {(0, "output")}
    assert [str(adjustment) for adjustment in found.adjustments] == [
        "recompute_config.recompute_slice_activation, layers 0, 2: asked slices, got swap: "
        "its input is swapped"
    ]


def test_a_plan_with_communication_reads_back_from_json(
    replicated: ModelStructure, shape: ModelStructure
) -> None:
    for found in (
        plan(shape, select_comm_recompute=True),
        plan(shape, select_comm_recompute=[1]),
        plan(replicated, sequence_parallel=False, recompute=True, recompute_slice_activation=True),
        plan_of(gather_weights_again=True),
    ):
        assert MemoryPlan.from_json(found.to_json()) == found


def test_a_model_without_parallel_layers_is_rejected_by_name() -> None:
    with pytest.raises(PlanError, match=r"tensor_parallel_size: 2 \(tensor parallelism\)"):
        apply(tiny_llama(), {"parallel_config": {"tensor_parallel_size": 2}})


def test_rows_that_nothing_can_carry_out() -> None:
    model = tiny_llama()
    rows = (
        PlanRow(0, "mlp.mul", "re-gather"),
        PlanRow(1, "self_attn", "slice"),
        PlanRow("embedding", "output", "slice"),
    )
    with pytest.raises(PlanError) as caught:
        install(model, plan_of(*rows), model_structure(model))
    assert [str(problem) for problem in caught.value.problems] == [
        "plan row 0.mlp.mul: expected a communication of the layer, found re-gather.",
        "plan row 1.self_attn: expected output, the output of a layer or of the embedding, found slice.",
        "plan row embedding.output: expected a tensor-parallel group, found slice. "
        "Apply the plan inside `with tensor_parallel_group(group):`.",
    ]


MAPPINGS = (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_mapping_without_a_group(mapping: Any) -> None:
    """Rejected: a silent group of one would train replicas that drift apart. A real one does nothing."""
    with pytest.raises(RuntimeError, match="no tensor-parallel group: pass process_group"):
        mapping(torch.ones(4))
    given = torch.ones(4)
    with tensor_parallel_group(group_of(1)):
        assert mapping(given) is given
    with pytest.raises(RuntimeError, match="no tensor-parallel group"):
        mapping(given)


@pytest.mark.parametrize("mapping", MAPPINGS[2::2])
def test_a_sequence_that_does_not_divide(mapping: Any) -> None:
    message = r"dim 0 of a tensor \[5, 2\] does not divide by 2 tensor-parallel ranks"
    with pytest.raises(ValueError, match=message):
        mapping(torch.ones(5, 2), process_group=group_of(2))
