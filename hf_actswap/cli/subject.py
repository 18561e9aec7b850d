"""Makes the model that a command analyses, on ``meta``, divided as the configuration says.

It is made from the configuration behind a Hub id, a folder or a ``config.json``; weights are not read.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from ..config import ActSwapConfig
from ..config.hub import HubOptions, fetch, split_hub_id
from ..errors import ActSwapError, Problem
from ..parallel import patch_model, tensor_parallel_group
from ..plan import MemoryPlan, ModelStructure, model_structure
from ..plan.wrappers import without_cache
from ..planner.profile import Profile
from .options import DtypeName, Lora, ModelRequest, QuantizeName


@dataclass(frozen=True)
class AnalysedModel:
    """A model to plan for.

    Args:
        name: as the user named it.
        model: the model on ``meta``; with several tensor-parallel ranks the part of rank 0.
        parameters, trained: numbers of parameters of the whole model, adapters included.
        quantize: how its frozen linear layers are stored; ``None``: in ``dtype``.
        prepared: whether all other weights are in fp32, as `prepare_kbit` makes them.
        profiles: of its steps, as they were computed from shapes, by what they depend on.
    """

    name: str
    model: nn.Module
    shape: ModelStructure
    parameters: int
    dtype: str
    tensor_parallel_size: int
    trained: int
    quantize: QuantizeName | None = None
    pipeline_stages: int = 1
    prepared: bool = False
    profiles: dict[object, Profile] = field(default_factory=dict, repr=False, compare=False)

    def described(self) -> str:
        """Return the model as one line of text."""
        layers = len(self.shape.layers)
        size = (
            f"{self.parameters / 1e9:.2f} B" if self.parameters >= 1e8 else f"{self.parameters / 1e6:.2f} M"
        )
        ranks = "" if self.tensor_parallel_size == 1 else f", rank 0 of {self.tensor_parallel_size}"
        base = f", {self.quantize} base" if self.quantize else ""
        part = f", {self.trained / 1e6:.2f} M trained" if self.trained < self.parameters else ""
        kind = self.shape.family or self.name
        made = type(_unadapted(self.model)).__name__
        named = getattr(self.model.config, "architectures", None) or ()
        if named and made not in named:
            kind += f" as {made}"
        return f"{kind}, {layers} layers, {size} parameters, {self.dtype}{base}{part}{ranks}"

    def document(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return {
            "name": self.name,
            "family": self.shape.family,
            "num_layers": len(self.shape.layers),
            "parameters": self.parameters,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "functions_known": self.shape.functions_known,
            "trained": self.trained,
            "quantize": self.quantize,
            "prepared_for_kbit": self.prepared,
        }


def with_tp(config: ActSwapConfig, tp: int | None) -> ActSwapConfig:
    """Return the configuration with another ``tensor_parallel_size``; with the same if ``tp`` is ``None``."""
    if tp is None:
        return config
    return replace(config, parallel_config=replace(config.parallel_config, tensor_parallel_size=tp))


@contextmanager
def subject(asked: ModelRequest, config: ActSwapConfig) -> Iterator[AnalysedModel]:
    """Make the model as one rank holds it; within the block its forward runs on fake tensors.

    Raises:
        ModelError: there is no such model.
        PatchError: the model cannot be divided as ``parallel_config`` says.
        PlanError: the model has no decoder layers.
    """
    model, parallel = model_on_meta(asked), config.parallel_config
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    size = parallel.tensor_parallel_size
    stages = parallel.pipeline_stage if parallel.runs_pipeline else 1
    facts = parameters_of(model), dtype_name(model), size, trained, asked.quantize, stages, asked.prepared
    if size == 1:
        yield AnalysedModel(asked.name, model, model_structure(model), *facts)
        return
    if asked.quantize is not None:
        expected = "1 where weights are quantised"
        raise ModelError([Problem("parallel_config.tensor_parallel_size", expected, str(size))])
    with rank_0_of(size) as group:
        patch_model(model, parallel, group)
        yield AnalysedModel(asked.name, model, model_structure(model), *facts)


class _ReplicatedStore(Store):
    """A store that answers as if every rank had written the same as this one; keys end in a rank's number."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        name = key.rpartition("/")[0]
        self._values[name] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self._values[key.rpartition("/")[0]]

    def add(self, _key: str, amount: int) -> int:
        return amount

    def wait(self, _keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        pass  # all ranks have written

    def check(self, _keys: Sequence[str]) -> bool:
        return True


@contextmanager
def rank_0_of(size: int) -> Iterator[dist.ProcessGroup]:
    """Within the block this process alone is rank 0 of a tensor-parallel group of ``size`` ranks.

    So a rank's part of the model can be made in one process. PyTorch's fake process group returns from every
    collective at once and moves no data; fake tensors have no data.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group exists already: this command pretends to be one of several")
    store = _ReplicatedStore()  # a reference must stay here: PyTorch holds the C++ part only
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None  # just made
        with tensor_parallel_group(group):
            yield group
    finally:
        dist.destroy_process_group()


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_FILE = "config.json"
_MAX_BYTES = 4 * 1024 * 1024
_KINDS = "a language model of transformers: causal, of images or speech, sequence to sequence or masked"
_EXPECTED = f"a folder that holds {_FILE}, such a file, or a Hub id (org/name)"


class ModelError(ActSwapError):
    """No language model can be made of what the user named."""

    subject = "model"


def model_on_meta(asked: ModelRequest) -> nn.Module:
    """Return the model in training mode on ``meta``, with its adapters (`random_model`)."""
    meta = torch.device("meta")
    model = random_model(asked.name, asked.dtype, meta, trust_remote_code=asked.trust_remote_code)
    quantised = [] if asked.quantize is None else _quantised_linears(model)
    if asked.prepared:
        prepare_kbit(model, quantised)
    for linear in quantised:
        linear.__class__ = Linear8bitLt if asked.quantize == "8bit" else Linear4bit
    return model if asked.lora is None else _adapted(model, asked.lora, meta, asked.adapters_in_fp32)


def _quantised_linears(model: Any) -> list[nn.Linear]:
    """Return the linear layers but for the head (``get_keys_to_not_convert`` in transformers)."""
    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]


def prepare_kbit(model: nn.Module, quantised: Iterable[nn.Linear]) -> None:
    """Make all other weights fp32, as ``prepare_model_for_kbit_training`` does (``peft/utils/other.py``)."""
    stays = {id(linear.weight) for linear in quantised}
    for weight in model.parameters():
        if id(weight) not in stays:
            weight.data = weight.data.float()


class _LinearWithSavedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        with torch.autocast(input.device.type, enabled=False):
            return nn.functional.linear(input.to(weight.dtype), weight, bias).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        input, weight = ctx.saved_tensors
        return (gradients[0].to(weight.dtype) @ weight).to(input.dtype), None, None


def _product_in_own_type(input: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    with torch.autocast(input.device.type, enabled=False):
        return nn.functional.linear(input, weight, bias)


class _Linear4bitProduct(torch.autograd.Function):
    """One node of autograd, as bitsandbytes' ``MatMul4Bit``: points of release count nodes."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        ctx.weight = weight
        return _product_in_own_type(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0] @ ctx.weight, None, None


class QuantisedLinear(nn.Linear):
    """A frozen layer of a model of `model_on_meta` whose weight is stored in four or eight bits.

    Attributes:
        adapted: whether an adapter is around it.
        inside: the ops inside it whose results may be saved; bitsandbytes' releases call them otherwise.
    """

    adapted = False
    inside: tuple[str, ...] = ("linear",)


class Linear8bitLt(QuantisedLinear):
    """Returns its input's type, and keeps its input until backward, as bitsandbytes' layer of this name does.

    There it is an attribute of the graph's node (``MatMul8bitLt``), which no hook of saved tensors sees: to
    swap it would free nothing. It goes where the layer itself is recomputed.
    """

    inside = ("linear", "to")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _LinearWithSavedInput.apply(input, self.weight, self.bias)
        return result


class Linear4bit(QuantisedLinear):
    """Computes in the weight's type and returns its input's, as bitsandbytes' layer of this name does.

    Behind a norm in fp32 (`prepare_kbit`), all that the layer returns is in fp32, also under autocast.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Without an adapter nothing copies the result, and what a node makes inside could not be recomputed.
        needs_node = self.adapted and torch.is_grad_enabled() and input.requires_grad
        product: Any = _Linear4bitProduct.apply if needs_node else _product_in_own_type
        result: torch.Tensor = product(input.to(self.weight.dtype), self.weight, self.bias).to(input.dtype)
        return result


def _adapt_4bit(adapter: Any, x: torch.Tensor) -> torch.Tensor:
    """Run the adapter of a layer in four bits as ``peft/tuners/lora/bnb.py`` does: it copies the result."""
    result: torch.Tensor = adapter.base_layer(x).clone()
    for name in adapter.active_adapters:
        low = adapter.lora_A[name]
        given = adapter.lora_dropout[name](_cast_without_autocast(x, low.weight.dtype))
        added = adapter.lora_B[name](low(given)) * adapter.scaling[name]
        result = result + (added if torch.is_autocast_enabled(x.device.type) else added.to(result.dtype))
    return result


def quantised_weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights of a model of `model_on_meta` that are stored in four or eight bits."""
    return [module.weight for module in model.modules() if isinstance(module, QuantisedLinear)]


def with_stored_names(plan: MemoryPlan, found: AnalysedModel) -> MemoryPlan:
    """Name quantised layers in place of the ops inside them: these differ from release to release.

    What `Linear4bit` computes is ``linear`` in bitsandbytes 0.43 and ``gemm_4bit`` in 0.50.
    """
    inside = {
        (layer.index, f"{path}.{op}"): path
        for layer in found.shape.layers
        for path, module in found.model.get_submodule(layer.module_path).named_modules()
        if isinstance(module, QuantisedLinear)
        for op in module.inside
    }
    rows = (replace(row, op_path=inside.get((row.scope, row.op_path), row.op_path)) for row in plan.rows)
    return replace(plan, rows=tuple(dict.fromkeys(rows)))


def _cast_without_autocast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast the input of an adapter of a quantised layer, as PEFT does it (``requires_conversion``)."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(dtype)


def _adapted(model: nn.Module, lora: Lora, device: torch.device, in_fp32: bool) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        hint = "pip install peft"
        raise ModelError([Problem("--lora", "PEFT, which makes the adapters", str(error), hint)]) from None
    targets: Any = lora.targets or None
    settings = LoraConfig(
        r=lora.r,
        target_modules="all-linear" if targets == ("all-linear",) else targets and list(targets),
        lora_dropout=lora.dropout,
        task_type=_peft_task(model),
    )
    try:
        with device, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT reads deprecated names of transformers
            adapted: nn.Module = get_peft_model(model, settings)
    except Exception as error:  # PEFT raises ValueError, KeyError, ... for names that are not there
        hint = "Name the modules: --lora r=16,targets=all-linear."
        raise ModelError(
            [Problem("--lora", "modules that PEFT can adapt", str(error)[:300], hint)]
        ) from error
    if not in_fp32:
        base_type = next(weight.dtype for weight in model.parameters() if not weight.requires_grad)
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.data = weight.data.to(base_type)
    adapters: Iterable[Any] = adapted.modules()
    for adapter in adapters:
        if isinstance(base := getattr(adapter, "base_layer", None), QuantisedLinear):
            base.adapted, adapter._cast_input_dtype = True, _cast_without_autocast
            if isinstance(base, Linear4bit):
                adapter.forward = MethodType(_adapt_4bit, adapter)
    return adapted.train()


def _peft_task(model: nn.Module) -> str | None:
    if getattr(model.config, "is_encoder_decoder", False):  # PEFT's own class for them hands on no features
        return None if _reads_features(model) else "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None


def _unadapted(model: nn.Module) -> Any:
    """Return the model inside PEFT's, if it is adapted."""
    return getattr(model, "get_base_model", lambda: model)()


def _reads_features(model: nn.Module) -> bool:
    """Whether a model reads features of sounds of one length, as Whisper does."""
    inner = _unadapted(model)
    of_one_length = hasattr(inner.config, "num_mel_bins") and hasattr(inner.config, "max_source_positions")
    return of_one_length and getattr(inner, "main_input_name", "") == "input_features"


def batch_on_meta(
    model: nn.Module, sequences: int, tokens: int, label_tokens: int
) -> dict[str, torch.Tensor]:
    """Return what a model is given in a step: ids ``[sequences, tokens]``, and labels for some of them.

    In place of ids Whisper reads features ``[sequences, mel bins, frames]``; its encoder takes one length
    only, 30 seconds (`WhisperEncoder.forward`).
    """
    with torch.device("meta"):
        labels = torch.empty(sequences, label_tokens, dtype=torch.long)
        if not _reads_features(model):
            # Two tensors: a model may change its labels.
            return {"input_ids": torch.empty(sequences, tokens, dtype=torch.long), "labels": labels}
        inner = _unadapted(model)
        config, encoder = inner.config, inner.get_encoder()
        frames = config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        features = torch.empty(sequences, config.num_mel_bins, frames, dtype=inner.dtype)
        return {"input_features": features, "labels": labels}


def random_model(
    name: str,
    dtype: DtypeName | None,
    device: torch.device,
    layers: int | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Return the model in training mode, with random initial weights; no weights are read.

    Its key-value cache is off, as under a plan.

    Args:
        name: a path, which has precedence if it exists, or ``org/name`` or ``org/name@revision``.
        dtype: ``None``: that of its configuration, else fp32.
        layers: how many of the first decoder layers to make; ``None``: all.

    Raises:
        ModelError: there is no such model, or transformers has no language model of its kind.
        torch.OutOfMemoryError: the model does not fit on the device.
    """
    place = _with_code(name) if trust_remote_code else {"pretrained_model_name_or_path": _config_path(name)}
    try:
        config = AutoConfig.from_pretrained(**place, trust_remote_code=trust_remote_code)
        if layers is not None:
            _cut_to(config.get_text_config(), layers)
        wanted = getattr(config, "dtype", None) if dtype is None else DTYPES[dtype]
        wanted = wanted if isinstance(wanted, torch.dtype) else torch.float32
        with torch.device(device):
            model: nn.Module = _class_for(config).from_config(
                config, dtype=wanted, trust_remote_code=trust_remote_code
            )
    except torch.OutOfMemoryError:
        raise
    # Reading an arbitrary file, transformers may raise anything: OSError, ValueError, KeyError ...
    except Exception as error:
        hint = (
            "Only if you trust that code: --trust-remote-code." if "trust_remote_code" in str(error) else ""
        )
        raise ModelError([Problem("model", _KINDS, _why(name, error), hint)]) from error
    without_cache(model)
    return model.train()


def _class_for(config: Any) -> Any:
    """Return the class that makes the model of a configuration.

    Of images and text only where transformers has no causal model for it; whole where it has an encoder.
    """
    whole = AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
    kinds = AutoModelForCausalLM, AutoModelForImageTextToText, *whole, AutoModelForMaskedLM
    own_code = getattr(config, "auto_map", None) or {}
    made: dict[Any, str] = {
        kind: own_code[kind.__name__].rpartition(".")[2] for kind in kinds if kind.__name__ in own_code
    }
    for kind in kinds:
        if kind is AutoModelForSpeechSeq2Seq and not hasattr(config, "num_mel_bins"):
            continue  # what it reads is not known (`batch_on_meta`)
        if (model := kind._model_mapping.get(type(config), None)) is not None:
            made.setdefault(kind, model.__name__)
    if not made:
        raise ValueError(f"a {type(config).__name__}, for which it has none")
    named = [kind for kind in made if made[kind] in (config.architectures or ())]
    found = next((kind for kind in whole if kind in made), None)
    if found is not None and config.is_encoder_decoder and AutoModelForCausalLM not in named:
        return found
    return AutoModelForMaskedLM if named == [AutoModelForMaskedLM] else next(iter(made))


def parameters_of(model: nn.Module) -> int:
    """Return the number of a model's parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def dtype_name(model: nn.Module) -> str:
    """Return the types of a model's weights, as the user writes them (``bf16``)."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    found = {parameter.dtype for parameter in model.parameters()}
    return ", ".join(sorted(names.get(dtype, str(dtype).removeprefix("torch.")) for dtype in found))


def _cut_to(config: Any, layers: int) -> None:
    """Cut a configuration to its first layers, also in lists with an entry per layer (``layer_types``)."""
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, key, value[:layers])
    config.num_hidden_layers = layers


def _with_code(name: str) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` that locate configuration and code: a folder or a Hub id."""
    hub_id = None if Path(name).exists() else split_hub_id(name)
    if hub_id is None:
        return {"pretrained_model_name_or_path": str(Path(_config_path(name)).parent)}
    return {"pretrained_model_name_or_path": hub_id[0], "revision": hub_id[1]}


def _config_path(name: str) -> str:
    path = Path(name)
    if os.path.exists(path):
        inside = path / _FILE if path.is_dir() else path
        if not inside.is_file():
            raise _no_model(name, f"a folder without {_FILE}")
        return str(inside)
    hub_id = split_hub_id(name)
    if hub_id is None:
        raise _no_model(name, "no such file or folder, and no Hub id")
    try:
        return fetch(hub_id[0], _FILE, hub_id[1], HubOptions(), _MAX_BYTES).path
    except OSError as error:
        raise _no_model(name, f"no such file or folder, and from the Hub: {error}") from error


def _no_model(name: str, found: str) -> ModelError:
    return ModelError([Problem("model", _EXPECTED, f"'{name}': {found}")])


def _why(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"'{name}': {text[:300] or type(error).__name__}{'...' if len(text) > 300 else ''}"
