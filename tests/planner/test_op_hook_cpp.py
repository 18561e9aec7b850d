"""The header for C++: an operator with a name, a fake implementation and marks, in a training under plans."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.cpp_extension import load_inline

import hf_actswap
from hf_actswap import apply, model_structure
from tests.engine.tiny_models import assert_bitwise_equal, gradients_of_step, tiny_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler"),
]

SOURCE = """
#include <hf_actswap/op_hook.h>
#include <torch/extension.h>

at::Tensor doubled(const at::Tensor& x) {
  hf_actswap::OpHook hook("doubled_kernel", {x});
  TORCH_CHECK(x.numel() < 1000000, "too large");
  at::Tensor plain = x.contiguous();
  at::Tensor y = at::empty_like(plain);
  const float* from = plain.data_ptr<float>();
  float* to = y.data_ptr<float>();
  for (int64_t i = 0; i < plain.numel(); ++i) to[i] = 2 * from[i] * from[i];
  hook.outputs({y});
  return y;
}

TORCH_LIBRARY(actswap_test, m) { m.def("doubled(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(actswap_test, CPU, m) { m.impl("doubled", doubled); }
"""


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_inline(
        "actswap_test_ops",
        SOURCE,
        functions=["doubled"],
        extra_include_paths=[str(Path(hf_actswap.__file__).parent / "include")],
        build_directory=str(tmp_path_factory.mktemp("ops")),
    )


@pytest.fixture(scope="module")
def doubled(extension: Any) -> Any:
    torch.library.register_fake("actswap_test::doubled", lambda x: torch.empty_like(x))
    torch.library.register_autograd(
        "actswap_test::doubled",
        lambda ctx, g: 4 * ctx.saved_tensors[0] * g,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return torch.ops.actswap_test.doubled


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_marks_surround_the_kernel(extension: Any) -> None:
    with Seen() as seen:
        extension.doubled(torch.ones(3))
        with pytest.raises(RuntimeError, match="too large"):
            extension.doubled(torch.ones(2_000_000))
    marks = [name for name in seen.names if name.startswith("hf_actswap::")]
    assert marks == ["hf_actswap::op_begin", "hf_actswap::op_end"] * 2


class Doubled(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


def test_it_is_an_op_with_a_name(doubled: Any) -> None:
    def made() -> nn.Module:
        model = tiny_llama()
        for layer in model.model.layers:
            layer.mlp.act_fn = Doubled(doubled)
        return model

    model = made()
    assert any(op.path == "mlp.act_fn.doubled" for op in model_structure(model).layers[0].ops)
    expected = gradients_of_step(made())
    with apply(
        model, {"recompute_config": {"select_recompute": ["mlp.act_fn.doubled", "mlp.mul"]}}
    ) as applied:
        assert_bitwise_equal(gradients_of_step(model), expected)
        assert applied.stats().recomputes > 0
