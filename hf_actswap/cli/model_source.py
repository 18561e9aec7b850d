"""A model of which only the shapes exist, from a Hub id, a folder or a ``config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ..config.hub import HubOptions, fetch, split_hub_id
from ..errors import ActSwapError, Problem
from .options import DtypeName
from .plan_request import Lora, ModelRequest

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_FILE = "config.json"
_MAX_BYTES = 4 * 1024 * 1024
_EXPECTED = f"a folder that holds {_FILE}, such a file, or a Hub id (org/name)"


class ModelError(ActSwapError):
    """No causal language model can be made of what the user named."""

    subject = "model"


def model_on_meta(asked: ModelRequest) -> nn.Module:
    """Return the model in training mode, all tensors on ``meta``, with its adapters; see `random_model`.

    Raises:
        ModelError: also where PEFT is missing, or finds nothing to adapt.
    """
    meta = torch.device("meta")
    model = random_model(asked.name, asked.dtype, meta, trust_remote_code=asked.trust_remote_code)
    return model if asked.lora is None else _adapted(model, asked.lora, meta)


def _adapted(model: nn.Module, lora: Lora, device: torch.device) -> nn.Module:
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
        task_type="CAUSAL_LM",
    )
    try:
        with device:
            adapted: nn.Module = get_peft_model(model, settings)
    except Exception as error:  # PEFT raises ValueError, KeyError, ... for names that are not there
        hint = "Name the modules: --lora r=16,targets=all-linear."
        raise ModelError(
            [Problem("--lora", "modules that PEFT can adapt", str(error)[:300], hint)]
        ) from error
    return adapted.train()


def random_model(
    name: str,
    dtype: DtypeName | None,
    device: torch.device,
    layers: int | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Return the model in training mode, its weights as they are before training. None are read.

    Args:
        name: a path, which wins where it exists, or ``org/name`` or ``org/name@revision``.
        dtype: of its weights; ``None``: what its configuration says, else fp32.
        device: of its weights.
        layers: how many of its decoder layers it has, the first ones; ``None``: all.
        trust_remote_code: whether code that lies beside the configuration may run.

    Raises:
        ModelError: there is none, or it is no causal language model of transformers.
        torch.OutOfMemoryError: the device has no room for it.
    """
    place = _with_code(name) if trust_remote_code else {"pretrained_model_name_or_path": _config_path(name)}
    try:
        config = AutoConfig.from_pretrained(**place, trust_remote_code=trust_remote_code)
        if layers is not None:
            _cut_to(config.get_text_config(), layers)
        wanted = DTYPES[dtype] if dtype is not None else _dtype_of(config)
        with torch.device(device):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=wanted, trust_remote_code=trust_remote_code
            )
    except torch.OutOfMemoryError:
        raise
    # transformers raises whatever its reading of a file of anybody's meets: OSError, ValueError, KeyError ...
    except Exception as error:
        hint = (
            "Only if you trust that code: --trust-remote-code." if "trust_remote_code" in str(error) else ""
        )
        raise ModelError(
            [Problem("model", "a causal language model of transformers", _why(name, error), hint)]
        ) from error
    return model.train()


def parameters_of(model: nn.Module) -> int:
    """Return how many numbers its weights are; tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def dtype_name(model: nn.Module) -> str:
    """Return the types of its weights, as the user writes them."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    found = {parameter.dtype for parameter in model.parameters()}
    return ", ".join(sorted(names.get(dtype, str(dtype).removeprefix("torch.")) for dtype in found))


def _cut_to(config: Any, layers: int) -> None:
    """Leave the first layers; so also in lists that have an entry for each (``layer_types``)."""
    count = config.num_hidden_layers
    lists = {key: value for key, value in config.to_dict().items() if isinstance(value, list)}
    for key, value in lists.items():
        if len(value) == count:
            setattr(config, key, value[:layers])
    config.num_hidden_layers = layers


def _dtype_of(config: Any) -> torch.dtype:
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _with_code(name: str) -> dict[str, Any]:
    """Where the configuration and the code lie: a folder, or a repository on the Hub and its revision."""
    path = Path(name)
    hub_id = None if path.exists() else split_hub_id(name)
    if hub_id is None:
        return {"pretrained_model_name_or_path": str(Path(_config_path(name)).parent)}
    return {"pretrained_model_name_or_path": hub_id[0], "revision": hub_id[1]}


def _config_path(name: str) -> str:
    path = Path(name)
    try:
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if exists:
        inside = path / _FILE if path.is_dir() else path
        if not inside.is_file():
            raise ModelError([Problem("model", _EXPECTED, f"'{name}': a folder without {_FILE}")])
        return str(inside)
    hub_id = split_hub_id(name)
    if hub_id is None:
        raise ModelError([Problem("model", _EXPECTED, f"'{name}': no such file or folder, and no Hub id")])
    try:
        return fetch(hub_id[0], _FILE, hub_id[1], HubOptions(), _MAX_BYTES).path
    except OSError as error:
        found = f"'{name}': no such file or folder, and from the Hub: {error}"
        raise ModelError([Problem("model", _EXPECTED, found)]) from error


def _why(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"'{name}': {text[:300] or type(error).__name__}{'...' if len(text) > 300 else ''}"
