"""What does not fit the model, or cannot be applied: all of it at once, before any step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from hf_actswap import ConfigError, MemoryPlan, PlanError, apply, model_structure
from hf_actswap.plan import PlanRow

PlanOf = Callable[..., MemoryPlan]
MakeModel = Callable[..., nn.Module]


def problems_of(call: Callable[[], object]) -> list[str]:
    with pytest.raises(PlanError) as caught:
        call()
    assert str(caught.value).count("\n  - ") == len(caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


def test_every_problem_at_once(plan_of: PlanOf) -> None:
    document = {
        "swap_config": {
            "swap": True,
            "layer_swap": [{"backward_prefetch": 1, "layers": [0, 4]}],
            "op_swap": [
                {"op_name": "atention", "backward_prefetch": 1, "layers": [0]},
                {"op_name": ["mlp", "q_proj"], "backward_prefetch": 1, "layers": [9]},
            ],
        },
        "recompute_config": {
            "recompute": [5],
            "select_recompute": {r"feed_forward\.muul": [0], "mlp": [6, 1]},
            "select_comm_recompute": {"attention_nrm": True},
            "select_recompute_exclude": {"mlp.up_porj": True},
        },
        "parallel_config": {"pipeline_stage": 3, "offset": [0, 1, 1]},
        "model": {"model_config": {"num_layers": 48}},
    }
    of_llama = "expected a path that names an op of LlamaDecoderLayer, found"
    assert problems_of(lambda: plan_of(document)) == [
        "model.model_config.num_layers: expected 4, found 48, and the model has 4 layers. "
        "Change it or remove it; it is only a check.",
        "parallel_config.offset: expected offsets that add up to 1 over 3 chunks "
        "(4 layers % (pipeline_stage 3 * pp_interleave_num 1)), found [0, 1, 1], which adds up to 2. "
        "For example [0, 1, 0].",
        "recompute_config.recompute[0]: expected a layer index from 0 to 3, found 5.",
        "recompute_config.select_recompute.mlp[0]: expected a layer index from 0 to 3, found 6.",
        "swap_config.layer_swap[0].layers: expected layers from 0 to 3, found 4.",
        f"swap_config.op_swap[0].op_name: {of_llama} 'atention'. Did you mean 'attention'?",
        "swap_config.op_swap[1].layers: expected layers from 0 to 3, found 9.",
        "swap_config.op_swap[2].layers: expected layers from 0 to 3, found 9.",
        f"swap_config.op_swap[2].op_name: {of_llama} 'q_proj'. Did you mean 'self_attn.q_proj'?",
        f"recompute_config.select_comm_recompute: {of_llama} 'attention_nrm'. Did you mean 'attention_norm'?",
        f"recompute_config.select_recompute_exclude: {of_llama} 'mlp.up_porj'. Did you mean 'mlp.up_proj'?",
    ]


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param({"select_recompute": {"mlp.muul": False}}, id="no-layer"),
        pytest.param({"select_recompute": {"mlp.muul": [0]}}, id="zero-layers"),
        pytest.param({"recompute": True, "select_recompute": {"mlp.muul": True}}, id="beaten-by-full"),
    ],
)
def test_a_typo_shows_even_where_no_layer_is_left(recompute: dict[str, Any], plan_of: PlanOf) -> None:
    assert problems_of(lambda: plan_of({"recompute_config": recompute})) == [
        "recompute_config.select_recompute: expected a path that names an op of LlamaDecoderLayer, "
        "found 'mlp.muul'. Did you mean 'mlp.mul'?"
    ]


MALFORMED = """
swap_config:
  swap: true
  op_swap:
    - {op_name: atention, backward_prefetch: 0, layers: [0, 7]}
    - {op_name: '(', backward_prefetch: 3, layers: [1]}
    - {op_name: mpl, backward_prefetch: 3, layers: 2}
    - {op_name: mpl, backward_prefetch: 4, layers: true}
recompute_config: {select_recompute: {mlp.mull: true}, nope: 1}
"""


def test_mistakes_of_the_file_and_of_the_model_at_once(tiny_model: MakeModel) -> None:
    with pytest.raises(ConfigError) as caught:
        apply(tiny_model("llama"), MALFORMED)
    assert [problem.where for problem in caught.value.problems] == [
        "swap_config.op_swap[0].backward_prefetch",
        "swap_config.op_swap[1].op_name",
        "swap_config.op_swap[2].layers",
        "recompute_config.nope",
        "swap_config.op_swap[0].layers",
        "swap_config.op_swap[0].op_name",
        "swap_config.op_swap[2].op_name",
        "recompute_config.select_recompute",
    ]
    assert caught.value.__suppress_context__  # one traceback, of the user's own call


@pytest.mark.parametrize("bad", ["swap_config: {swap: 3}", "parallel_config: {pipeline_stage: 0}"])
def test_nothing_is_said_of_a_model_where_it_depends_on_what_is_unreadable(
    tiny_model: MakeModel, bad: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        apply(tiny_model("llama"), f"{bad}\nrecompute_config: {{recompute: [2, 2, 2]}}\n")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("meta-llama/Llama-2-7b-hf", "from_pretrained('meta-llama/Llama-2-7b-hf')"),
        (None, "found a NoneType"),
        ({"swap_config": {}}, "found a dict"),
        (nn.Linear, "found a class"),
    ],
)
def test_what_is_no_model_is_said(given: Any, found: str) -> None:
    (problem,) = problems_of(lambda: apply(given, {"swap_config": {"swap": True}}))
    assert problem.startswith("model: expected a model (torch.nn.Module), found ")
    assert found in problem


def test_a_model_without_known_layers_is_described() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = nn.Linear(2, 2)

    model = nn.Sequential(nn.ModuleList([Block(), Block()]))
    (problem,) = problems_of(lambda: model_structure(model))
    assert "found Sequential, whose 0 is 2 Block with mixer. This family is not known here" in problem
    (problem,) = problems_of(lambda: model_structure(nn.Linear(2, 2)))
    assert problem.endswith("found Linear. Pass the model itself.")


def test_hints_name_ops_of_this_family(plan_of: PlanOf) -> None:
    document = {
        "recompute_config": {"select_recompute": {"feed_forward.mull": True, "attention.q_proj": True}}
    }
    assert problems_of(lambda: plan_of(document, "gpt_neox", 2)) == [
        "recompute_config.select_recompute: expected a path that names an op of GPTNeoXLayer, "
        "found 'feed_forward.mull'. Did you mean 'feed_forward'?",
        "recompute_config.select_recompute: expected a path that names an op of GPTNeoXLayer, "
        "found 'attention.q_proj'. Did you mean 'attention.wq'?",
    ]


def test_apply_rejects_by_name_what_resolves(plan_of: PlanOf, tiny_model: MakeModel) -> None:
    document = {"parallel_config": {"tensor_parallel_size": 2}}
    requested = "parallel_config.tensor_parallel_size: 2 (tensor parallelism)"
    assert plan_of(document).unsupported == (requested,)
    model = tiny_model("llama", 4)
    for given in (document, plan_of(document)):
        assert problems_of(lambda given=given: apply(model, given)) == [
            f"plan: expected what this version can carry out, found {requested}. "
            "Remove it from the configuration."
        ]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_apply_rejects_the_plan_of_another_model(tiny_model: MakeModel) -> None:
    plan = MemoryPlan((PlanRow(3, "mlp", "recompute"),), num_layers=4)
    assert problems_of(lambda: apply(tiny_model("llama", 2), plan)) == [
        "plan.num_layers: expected 2, as in the model, found 4."
    ]


def test_one_module_listed_as_two_layers_is_rejected(tiny_model: MakeModel) -> None:
    model = tiny_model("llama", 3)
    model.model.layers[2] = model.model.layers[0]
    with pytest.raises(PlanError) as caught:
        model_structure(model)
    assert str(caught.value).splitlines()[1] == (
        "  - model.model.layers: expected a module of its own for each layer, found layer 2 is layer 0. "
        "A rule by layer index cannot tell the two apart."
    )
