"""``--no-weights``: models that are made from their configuration, without a file of weights.

The weights are memory that nobody writes, so that a model of 70 billion weights takes none of this machine.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_SMALL_BYTES = 1 << 20


def load_no_weights(modeling: ModuleType) -> None:
    """Let ``from_pretrained`` of transformers' models read the configuration alone.

    Args:
        modeling: ``transformers.modeling_utils``.
    """
    torch, base = sys.modules["torch"], modeling.PreTrainedModel

    def from_pretrained(cls: Any, name: Any, *arguments: Any, config: Any = None, **options: Any) -> Any:
        wanted = options.pop("dtype", options.pop("torch_dtype", "auto"))
        own = {
            key: options.pop(key)
            for key in ("attn_implementation", "experts_implementation")
            if key in options
        }
        place, told = options.pop("device_map", None), options.pop("output_loading_info", False)
        if not hasattr(config, "to_dict"):
            of_hub = ("cache_dir", "revision", "token", "local_files_only", "subfolder", "force_download")
            kept = {key: options[key] for key in of_hub if options.get(key) is not None}
            config = cls.config_class.from_pretrained(name, **kept)
        config = copy.deepcopy(config)
        config.name_or_path = str(name)
        quantizer, place = _quantizer(modeling, config, options.get("quantization_config"), place)
        dtype = (
            getattr(torch, wanted.removeprefix("torch."))
            if isinstance(wanted, str) and wanted != "auto"
            else wanted
        )
        if dtype in ("auto", None):
            dtype = getattr(config, "dtype", None) or torch.get_default_dtype()
        with _weights_on_meta(torch):
            model = cls._from_config(config, dtype=dtype, **own)
            if quantizer is not None:
                quantizer.preprocess_model(model=model, dtype=dtype, device_map=place)
        if quantizer is not None:
            _take_quantised_memory(torch, model, quantizer, dtype, _first_device(place))
        _take_memory(torch, model)
        model.tie_weights()
        model.eval()
        if place is not None:
            model.to(_first_device(place))
        if quantizer is not None:
            model.hf_quantizer = quantizer
            quantizer.postprocess_model(model)
        return (model, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}) if told else model

    base.from_pretrained = classmethod(from_pretrained)


def copy_no_weights(frozen_weights: Any) -> None:
    """Let weights that nobody wrote stay so where they move within the host's memory.

    Args:
        frozen_weights: ``hf_actswap.engine.frozen_weights``.
    """
    write = frozen_weights._write

    def of_small_ones(target: Any, weight: Any) -> None:
        if weight.nbytes <= _SMALL_BYTES or weight.device.type != "cpu" or target.device.type != "cpu":
            write(target, weight)

    frozen_weights._write = of_small_ones


def _quantizer(modeling: Any, config: Any, asked: Any, place: Any) -> tuple[Any, Any]:
    """Return what quantises the weights, or ``None``, and where they go.

    Raises:
        RuntimeError: they are quantised by something else than bitsandbytes.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None and asked is None:
        return None, place
    quantizer, _, place = modeling.get_hf_quantizer(config, asked, place, True, {})
    if type(quantizer).__module__.rpartition(".")[2] not in ("quantizer_bnb_4bit", "quantizer_bnb_8bit"):
        raise RuntimeError(
            "a rehearsal with --no-weights makes plain weights and those of bitsandbytes: leave "
            "quantization_config out, or rehearse with the quantised files and without --no-weights."
        )
    quantizer.pre_quantized = False  # a file's quantised weights are made here
    return quantizer, place


def _take_quantised_memory(torch: ModuleType, model: Any, quantizer: Any, dtype: Any, device: Any) -> None:
    """Quantise weights that nobody wrote, one after the other as they are when a model is loaded."""
    convert = quantizer.get_quantize_ops().convert
    names = [name for name, _ in model.named_parameters() if quantizer.param_needs_quantization(model, name)]
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        weight = torch.empty(module.out_features, module.in_features, dtype=dtype, device=device)
        made = convert({name: [weight]}, full_layer_name=name, model=model)[name]
        module._parameters[name.rpartition(".")[2]] = made


@contextmanager
def _weights_on_meta(torch: ModuleType) -> Iterator[None]:
    """Within the block parameters have shapes only; buffers, which are small, have values."""
    original = torch.nn.Module.register_parameter

    def register(module: Any, name: str, parameter: Any) -> None:
        original(module, name, parameter)
        if parameter is not None:
            shape_only = torch.nn.Parameter(
                parameter.detach().to("meta"), requires_grad=parameter.requires_grad
            )
            module._parameters[name] = shape_only

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original


def _take_memory(torch: ModuleType, model: Any) -> None:
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None or not weight.is_meta:
                continue
            if id(weight) not in made:
                taken = torch.empty_like(weight, device="cpu")
                if taken.nbytes <= _SMALL_BYTES:
                    _fill(taken, name)
                made[id(weight)] = torch.nn.Parameter(taken, requires_grad=weight.requires_grad)
            module._parameters[name] = made[id(weight)]


def _fill(weight: Any, name: str) -> None:
    if weight.dim() > 1:
        weight.normal_(std=0.02)
    else:
        weight.fill_(0.0 if "bias" in name else 1.0)


def _first_device(place: Any) -> Any:
    if isinstance(place, dict):
        place = next(iter(place.values()))
    return (
        "cuda:0" if isinstance(place, str) and place.startswith(("auto", "balanced", "sequential")) else place
    )
