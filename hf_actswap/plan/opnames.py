"""Names the functions that a layer calls (``<module path>.<function>``), and translates MindFormers' names.

Functions called between modules (``mul`` in an MLP, the attention core) are seen by a ``TorchFunctionMode``
in call order; their names here do not depend on the device or the kernel. The model structure and the engine
name ops with the same code, so a path that a plan accepts is the path that the engine finds.

The parts of a MindFormers layer (`spec: Llama layer of mindformers.models.llama`, and the Megatron-core
names of its later versions) are found by structure where possible: an attention block holds an attention
core; a feed-forward network holds an activation, and beside it, if it is gated, a product. Structure does not
show which projection makes the queries: for that, tables list the names in Hugging Face's families, and the
first that a layer has counts. An op that the layer does not have maps to nothing: a rule that names it has no
effect, and the plan says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count, takewhile
from typing import Any

from .op_facts import COMMUNICATIONS

NameTable = Mapping[str, tuple[str, ...]]
"""Path in MindFormers' layer -> op paths of this layer; empty: the op has no counterpart."""

DEFAULT_SWAP_PATTERN = r".*\.flash_attention"
DEFAULT_SELECT_PATTERNS = (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
DEFAULT_COMM_PATTERNS = (r".*\.norm",)

ATTENTION_CORE = "flash_attention"
"""The op between the projections of an attention module, whatever implements it (MindFormers' name)."""

ATTENTION_MODULES = ("self_attn", "attention", "attn", "self_attention")
"""Names of attention modules whose class name does not contain "attention"."""

EXPERTS_MODULE = "experts"
"""Name of the module that holds the routed experts of an MoE block."""

_ACTIVATION = re.compile(r"(.*_)?act(_fn|_func|ivation|ivation_fn|\d)?|gelu_impl")
_OTHER_BLOCK = re.compile(r".*(attn|attention|mamba|mixer).*\..*")
"""Paths inside attention and state-space blocks: activations there belong to no feed-forward network."""

_FEED_FORWARDS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")
"""Names of feed-forward blocks, for layers in which no activation module is found."""

_PRODUCTS = ("linear", "addmm", "mm", "matmul")
"""Functions that multiply by a projection's weight (``addmm``: ``Conv1D`` of GPT-2; ``mm``: fp8 layers)."""

_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "in_proj")
_GATE_AND_UP = ("gate_up_proj", "Wi")
FUSED = ("attention.w_qkv", "feed_forward.w_gate_hidden")
"""MindFormers' names of fused layers: one product for queries, keys and values; one for gate and up."""

_ATTENTION_PROJECTIONS: Mapping[str, Sequence[str]] = {
    "wq": ("q_proj", "q_b_proj", "query", "q_lin", "query_proj", "q", *_QKV),
    "wk": ("k_proj", "kv_b_proj", "key", "k_lin", "key_proj", "k", *_QKV),
    "wv": ("v_proj", "kv_b_proj", "value", "v_lin", "value_proj", "v", *_QKV),
    "wo": ("o_proj", "out_proj", "dense", "c_proj", "out_lin", "o", "Wo", "proj", "output.dense"),
}
_FEED_FORWARD_PROJECTIONS: Mapping[str, Sequence[str]] = {
    "w1": (
        *("gate_proj", *_GATE_AND_UP, "wi_0", "wi", "fc1", "c_fc", "dense_h_to_4h", "fc_in", "w1", "lin1"),
        *("up_proj", "intermediate_dense", "dense", "ffn"),
    ),
    "w2": (
        *("down_proj", "wo", "fc2", "c_proj", "dense_4h_to_h", "fc_out", "w2", "lin2", "Wo"),
        *("output_dense", "ffn_output"),
    ),
    "w3": ("up_proj", *_GATE_AND_UP, "wi_1", "w3"),
}
_NORMS: Mapping[str, Sequence[str]] = {
    "attention_norm": (
        *("input_layernorm", "self_attn_layer_norm", "ln_1", "layer_norm1", "layernorm_before", "norm1"),
        *("ln_attn", "sa_layer_norm", "attn_norm", "norm_1", "norm_attn_norm.norm_1"),
        *("layer.0.layer_norm", "attention.output.LayerNorm", "attention.LayerNorm"),
        "post_attention_layernorm",  # OLMo 2, which norms behind
    ),
    "ffn_norm": (
        *("pre_feedforward_layernorm", "post_attention_layernorm", "final_layer_norm", "ln_2"),
        *("layer_norm2", "layernorm_after", "norm2", "ln_mlp", "output_layer_norm", "mlp_norm"),
        *("norm_2", "norm_attn_norm.norm_2", "layer.2.layer_norm", "layer.1.layer_norm"),
        *("output.LayerNorm", "full_layer_layer_norm", "post_feedforward_layernorm"),
    ),
}

_MEGATRON = {
    "self_attention": "attention",
    "self_attention.flash_attention": "attention.flash_attention",
    "self_attention.core_attention": "attention.flash_attention",
    "self_attention.core_attention.flash_attention": "attention.flash_attention",
    "self_attention.linear_proj": "attention.wo",
    "mlp": "feed_forward",
    "mlp.mul": "feed_forward.mul",
    "mlp.activation_func": "feed_forward.w1.activation",
    "mlp.activation_func.silu": "feed_forward.w1.activation.silu",
    "mlp.linear_fc2": "feed_forward.w2",
    "pre_mlp_layernorm": "ffn_norm",
}


def megatron_names(table: NameTable) -> NameTable:
    """Return the names of MindFormers' Megatron-core layers for the ops of ``table``."""
    return {new: table[old] for new, old in _MEGATRON.items() if old in table}


def reference_names(modules: Sequence[str], functions: Sequence[str], cores: Collection[str]) -> NameTable:
    """Return MindFormers' names for the ops of one layer; ``cores``: paths of its attention modules.

    The order counts: of several siblings that a pattern matches, the reference logs the last.
    """
    return _Names(modules, functions, cores).table()


class _Names:
    def __init__(self, modules: Sequence[str], functions: Sequence[str], cores: Collection[str]) -> None:
        self._modules, self._functions = modules, functions
        self._cores = [path for path in modules if path in cores]
        self._activations = [
            path
            for path in modules
            if _ACTIVATION.fullmatch(path.rpartition(".")[2]) and not _OTHER_BLOCK.fullmatch(path)
        ]

    def table(self) -> NameTable:
        table: dict[str, tuple[str, ...]] = {}
        for name, candidates in _NORMS.items():
            taken = table.get("attention_norm", ())
            found = self._first("", [path for path in candidates if not {path, f"{path}.0"} & {*taken}])
            table[name] = table[f"{name}.norm"] = found
        self._add_attention(table)
        self._add_feed_forward(table)
        table["add"] = self._present(self._functions, ["add"])
        return table

    def _add_attention(self, table: dict[str, tuple[str, ...]]) -> None:
        blocks = {
            core: self._block(core, {*self._activations, *self._cores} - {core}) for core in self._cores
        }
        core = self._present(self._functions, [f"{path}.{ATTENTION_CORE}" for path in blocks])
        table["attention"] = tuple(blocks.values())
        table["attention.flash_attention"] = table["attention.flash_attention.flash_attention"] = core
        for name, candidates in _ATTENTION_PROJECTIONS.items():
            found = [self._first(own, candidates) or self._first(blocks[own], candidates) for own in blocks]
            self._add_projection(table, f"attention.{name}", (path for paths in found for path in paths))
        fused = (path for path in table["attention.wq"] if path.rpartition(".")[2] in _QKV)
        self._add_projection(table, FUSED[0], fused)
        for name in (
            "split_qkv",
            "apply_rotary_emb",
            "merger_head_transpose",
            "transpose",
            "reshape",
            "cast",
            "cat",
        ):
            table[f"attention.{name}"] = ()

    def _add_feed_forward(self, table: dict[str, tuple[str, ...]]) -> None:
        activations = tuple(self._activations)
        holders = list(dict.fromkeys(path.rpartition(".")[0] for path in activations))
        blocks = tuple(dict.fromkeys(self._block(path, self._cores) for path in holders if path))
        blocks = blocks or (() if holders else self._first("", _FEED_FORWARDS))
        w1, w2, w3 = (
            tuple(path for holder in holders for path in self._first(holder, candidates))
            for candidates in _FEED_FORWARD_PROJECTIONS.values()
        )
        w2 = w2 or self._present(self._modules, ["output.dense"])  # BERT's is outside of what holds the rest
        table["feed_forward"] = blocks
        if not blocks or not all(path.startswith(tuple(f"{block}." for block in blocks)) for path in w2):
            parts = [*w1, *activations, *w2]  # no module is all of it
            table["feed_forward"] = self._called_in(parts) or tuple(parts)
        table["feed_forward.mul"] = self._present(
            self._functions, [f"{holder}.mul" for holder in holders if holder]
        )
        self._add_projection(table, "feed_forward.w1", w1)
        table["feed_forward.w1"] += activations
        table["feed_forward.w1.activation"] = activations
        table["feed_forward.w1.activation.silu"] = self._called_in(activations)
        table["feed_forward.activate"] = activations  # its name beside a fused layer
        table["feed_forward.activate.silu"] = table["feed_forward.w1.activation.silu"]
        self._add_projection(
            table, FUSED[1], (path for path in w1 if path.rpartition(".")[2] in _GATE_AND_UP)
        )
        self._add_projection(table, "feed_forward.w2", w2)
        own_w3 = (path for path in w3 if path not in w1 or path.endswith(_GATE_AND_UP))
        self._add_projection(table, "feed_forward.w3", own_w3)
        table["feed_forward.reshape"] = table["feed_forward.cast"] = table["feed_forward.split"] = ()
        routers = [self._first(block, ("gate", "router")) for block in blocks]
        table["feed_forward.router"] = tuple(path for paths in routers for path in paths)

    def _add_projection(self, table: dict[str, tuple[str, ...]], name: str, modules: Iterable[str]) -> None:
        table[name] = tuple(dict.fromkeys(modules))
        products = [f"{module}.{function}" for module in table[name] for function in _PRODUCTS]
        table[f"{name}.matmul"] = self._present(self._functions, products)
        table[f"{name}.reshape"] = ()

    def _block(self, path: str, others: Collection[str]) -> str:
        """Return the outermost module around ``path`` that contains none of ``others``."""
        parts = path.split(".")
        for end in range(1, len(parts)):
            above = ".".join(parts[:end])
            if above in self._modules and not any(f"{other}.".startswith(f"{above}.") for other in others):
                return above
        return path

    def _called_in(self, modules: Collection[str]) -> tuple[str, ...]:
        return tuple(path for path in self._functions if path.rpartition(".")[0] in modules)

    def _first(self, above: str, names: Sequence[str]) -> tuple[str, ...]:
        """Return the first of ``names`` that is a module below ``above``; of a list, the modules in it."""
        for path in (f"{above}.{name}" if above else name for name in names):
            if path in self._modules:
                return (path,)
            if listed := tuple(takewhile(self._modules.__contains__, (f"{path}.{n}" for n in count()))):
                return listed
        return ()

    def _present(self, ops: Collection[str], paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(path for path in paths if path in ops)


_CORE_STARTS = frozenset(
    {"scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum", "flex_attention", "softmax"}
)
_REFLECTED = {"rmul": "mul", "radd": "add", "rsub": "sub", "rdiv": "div", "truediv": "div", "rtruediv": "div"}
_NOT_OPS = frozenset(
    {"get", "set", "set_name", "size", "stride", "dim", "numel", "len", "is_floating_point", "device"}
)


@lru_cache(maxsize=1024)
def function_name(function: Callable[..., Any]) -> str | None:
    """Return the name of a function that a ``TorchFunctionMode`` saw, or ``None`` if it computes nothing.

    Operators and in-place forms share the name of the function (``x * y``, ``x.mul_(y)``: ``mul``), overloads
    of a registered operator that of the operator (``gemm_4bit.default``: ``gemm_4bit``).
    """
    name = getattr(function, "__name__", "").partition(".")[0]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    name = _REFLECTED.get(name, name).rstrip("_")
    return None if not name or name in _NOT_OPS else name


class OpStack:
    """Follows one call of one layer and names what happens in it.

    From the first matrix product or softmax called directly by a module of ``attention`` (paths inside the
    layer) until its next submodule or communication runs, everything is its attention core.
    """

    def __init__(self, attention: frozenset[str]) -> None:
        self._attention = attention
        self._modules: list[str] = []
        self._in_core = False
        self._calls: Counter[str] = Counter()

    @property
    def module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def enter(self, path: str) -> None:
        self._in_core = False
        self._modules.append(path)

    def leave(self, path: str) -> None:
        """Note that a submodule ends; submodules inside that an exception left end with it."""
        self._in_core = False
        while self._modules and self._modules.pop() != path:
            pass

    def begin(self, name: str) -> tuple[str, int]:
        """Return the op path of a function that is about to run, and its ordinal within the layer."""
        module = self.module
        if name in COMMUNICATIONS:
            self._in_core = False
        elif module in self._attention and (self._in_core or name in _CORE_STARTS):
            self._in_core = True
            name = ATTENTION_CORE
        path = f"{module}.{name}" if module else name
        return path, self._calls[path]

    def count(self, path: str) -> None:
        """Note that the op that `begin` named made a new storage (no view, not in place)."""
        self._calls[path] += 1

    def unseen(self) -> tuple[str, int]:
        """Return the op of a tensor that no visible function made: a custom ``autograd.Function`` did.

        It counts as the module that runs; in an attention module, as its attention core (flash-attention
        packages call such a function).
        """
        module = self.module
        return (f"{module}.{ATTENTION_CORE}" if module in self._attention else module), 0
