"""On the rehearsal's device (`make rehearse`): memory, several devices, what is said at the end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_actswap.rehearsal import Options, build, environment

pytestmark = pytest.mark.rehearsal


def run(code: str, options: Options, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run Python code on a device of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"import torch\n{code}"],
        env={**environment(options, build()), **settings},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


FILL = """
try:
    held = [torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(40)]
except torch.OutOfMemoryError as error:
    text = str(error)
_, total = torch.cuda.mem_get_info()
print(total == 3 * 2**30, "out of memory" in text.lower(), torch.cuda.max_memory_allocated() == 10 * 2**28)
"""


@pytest.mark.parametrize(
    "allocator", ["expandable_segments:False", "expandable_segments:True", "backend:cudaMallocAsync"]
)
def test_memory_has_a_limit(allocator: str) -> None:
    """Half a GiB of it is CUDA's own."""
    done = run(FILL, Options("A100-40", memory="3GiB", arithmetic="none"), PYTORCH_ALLOC_CONF=allocator)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:3] == ["True", "True", "True"], done.stdout


def test_host_memory_of_a_swap_takes_none_of_the_machine() -> None:
    """Locked pages that carry no values have nothing behind them: less than a hundredth is resident."""
    code = """
import resource
from hf_actswap.engine.host_pool import PinnedSlabs
slabs = PinnedSlabs(torch.device("cuda", 0))
slabs.allocate(2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
slab = slabs.allocate(2**29)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.empty(2**29, dtype=torch.uint8, device="cuda").copy_(slab, non_blocking=True)
torch.cuda.synchronize()
print(slab.is_pinned(), (after - before) * 1024 < 2**29 / 100)
"""
    done = run(code, Options("A100-40", arithmetic="none"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"], done.stdout


def test_a_swap_counts_on_the_host_memory_that_was_asked_for() -> None:
    code = """
from hf_actswap.engine.host_memory import available_bytes, room_beyond
from hf_actswap.engine.host_pool import PinnedSlabs
slabs = PinnedSlabs(torch.device("cuda", 0))
before, room = available_bytes(), room_beyond(0)
slab = slabs.allocate(2**40)
print(before == 2**42, before - room() == 2**40, slab.is_pinned())
"""
    done = run(code, Options("A100-40", arithmetic="none", host_memory="4TiB"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "True"], done.stdout


def test_what_cuda_takes_is_an_option() -> None:
    code = "print(*torch.cuda.mem_get_info())"
    done = run(code, Options("A100-40", memory="4GiB", arithmetic="none", context_bytes=2**30))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(3 * 2**30), str(2**32)], done.stdout


def test_several_devices() -> None:
    code = """
values = torch.arange(6.0, device="cuda:0")
there = (values.to("cuda:1") * 2).to(torch.float64)
print(torch.cuda.device_count(), torch.cuda.memory_allocated(1) > 0, there.to("cuda:0").tolist()[-1])
print(torch.cuda.get_device_name(1), torch.cuda.get_device_capability(1))
"""
    done = run(code, Options("RTX 4090", devices=2, arithmetic="all"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 True 10.0", "NVIDIA GeForce RTX 4090 (8, 9)"]


def test_algorithms_of_cub_run_where_pytorch_has_no_kernels_of_the_devices_own_architecture() -> None:
    """They ask which architecture their kernels are for; an RTX 4090 (8.9) runs those for 8.6."""
    code = """
values = torch.zeros(10**7, device="cuda")
values.masked_scatter(values == 0, values.cumsum(0)).sort()
torch.cuda.synchronize()
"""
    done = run(code, Options("RTX 4090"))
    assert done.returncode == 0, done.stderr


def test_the_end_names_what_nothing_orders_and_what_did_nothing() -> None:
    code = """
values = torch.ones(1000, device="cuda")
host = torch.empty(1000, pin_memory=True)
with torch.cuda.stream(torch.cuda.Stream()):
    host.copy_(values, non_blocking=True)
values.zero_()
torch.cuda.synchronize()
torch.cuda.CUDAGraph().reset()
"""
    done = run(code, Options(arithmetic="all"))
    assert done.returncode == 0, done.stderr
    assert "memory is used in no order: " in done.stderr
    assert "aten::fill_.Scalar on stream" in done.stderr or "aten::zero_ on stream" in done.stderr


def test_a_step_of_a_large_model_takes_no_memory_of_this_machine() -> None:
    code = """
import resource
weights = [torch.nn.Linear(16384, 16384, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(100)]
x = torch.ones(1024, 16384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
out = x
for weight in weights:
    out = weight(out)
out.float().sum().backward()
print(torch.cuda.max_memory_allocated() > 100 * 2**30)
status = open("/proc/self/status").read()  # getrusage counts the process that forked this one too
print(int(status.split("VmHWM:")[1].split()[0]) < 2 * 2**20)
"""
    done = run(code, Options("H200", arithmetic="small"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]
    assert "rehearsal: " not in done.stderr


def test_a_sequence_is_streamed_though_its_values_cannot_be_compared() -> None:
    code = """
import hf_actswap
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8}
model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).cuda()
hf_actswap.apply(model, {"stream_config": {"tokens": 64}, "tile_config": {"loss": 64}})
ids = torch.zeros(1, 256, dtype=torch.long, device="cuda")
model(input_ids=ids, labels=ids).loss.backward()
print(model.lm_head.weight.grad.shape[0])
"""
    done = run(code, Options("H100", arithmetic="small"))
    assert done.stdout.strip() == "32000", done.stderr


def test_without_values_nothing_is_computed() -> None:
    code = "x = torch.zeros(4, device='cuda'); x += 1; print(x.tolist())"
    assert run(code, Options(arithmetic="none")).stdout.strip() == "[0.0, 0.0, 0.0, 0.0]"
    assert run(code, Options(arithmetic="small")).stdout.strip() == "[1.0, 1.0, 1.0, 1.0]"
