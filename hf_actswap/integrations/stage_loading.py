"""Opens or makes a model on a pipeline rank, which has the weights of its own stage only."""

from __future__ import annotations

import functools
import os
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..config import ActSwapConfig
from ..config.schema import ParallelConfig
from ..errors import Problem, short_traceback
from ..parallel.mesh import started_processes
from ..pipeline import PipelineError, StagedModel
from ..pipeline.stages import layout_of, stage_of_rank
from ..plan import ConfigOrPlan, load_config_or_plan, model_structure

_OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_NOT_BESIDE = ("device_map", "distributed_config", "output_loading_info", "quantization_config", "state_dict")


@short_traceback
def stage_from_pretrained(kind: Any, source: str | os.PathLike[str], config: ConfigOrPlan, **how: Any) -> Any:
    """Load a pretrained model as ``kind.from_pretrained`` does, with the weights of this rank's stage only.

    The model has all modules and names. Parameters and buffers of other stages (their layers, the embedding,
    the norm, the head) are on ``meta``: they are neither read nor allocated. Pass the model to
    `ActSwapTrainer` with the same configuration. Adapters (PEFT) are added as usual.

        model = stage_from_pretrained(AutoModelForCausalLM, "meta-llama/Llama-3.1-70B", "config.yaml")

    transformers' ``from_pretrained`` loads, with its conversions of weights (experts), into a model without
    the modules of other stages. Files other than safetensors are read whole. Tied weights are read on the
    first and the last stage. With ``tensor_parallel_size`` each rank reads its whole stage, then divides it.
    If the configuration has no pipeline, the whole model is loaded.

    Args:
        kind: a class of transformers, or an auto class (``AutoModelForCausalLM``).
        source: a folder or a Hub id.
        config: as for `hf_actswap.apply`; its ``parallel_config`` sets the stages and their layers.
        how: further arguments of ``from_pretrained``.

    Raises:
        ConfigError: the configuration is malformed.
        PipelineError: the model cannot be divided into stages, or an argument in ``how`` is not supported.
    """
    parallel = _parallel_of(config)
    if not parallel.runs_pipeline:
        return kind.from_pretrained(source, **how)
    if problems := [_unfit(name) for name in _NOT_BESIDE if how.get(name)]:
        raise PipelineError(problems)
    whole = _on_meta(kind, source, how)
    return _opened_without(_foreign_parts(whole, parallel), type(whole), source, how)


@short_traceback
def stage_from_config(
    kind: Any, made_of: PreTrainedConfig, config: ConfigOrPlan, seed: int = 0, **how: Any
) -> Any:
    """Make a model with random weights for this rank's stage; the other stages stay on ``meta``.

        model = stage_from_config(AutoModelForCausalLM, LlamaConfig(...), "config.yaml", seed=42)

    Each module draws its weights from a seed of its own, made of ``seed`` and the module's name. So the
    weights are the same in any number of stages and in one process. They differ from those of
    ``from_config``, which draws all from one stream. The global generators stay as they are.

    Args:
        kind: a class of transformers, or an auto class.
        made_of: the model's transformers configuration.
        config: the actswap configuration, as for `stage_from_pretrained`; without a pipeline the whole model
            is made.
        seed: the seed of all weights; the same on every rank.
        how: further arguments of ``from_config`` (``dtype``, ``attn_implementation``).

    Raises:
        ConfigError: the configuration is malformed.
        PipelineError: the model has no parts to divide it by.
    """
    parallel = _parallel_of(config)
    whole = _on_meta(kind, "", {"config": made_of, **how})
    foreign = _foreign_parts(whole, parallel) if parallel.runs_pipeline else ()
    given = {"config": whole.config, "state_dict": {}, **how}
    return _opened_without(foreign, type(whole), None, given, seed).train()


def _parallel_of(config: ConfigOrPlan) -> ParallelConfig:
    loaded = load_config_or_plan(config)
    return loaded.parallel_config if isinstance(loaded, ActSwapConfig) else ParallelConfig()


def _foreign_parts(whole: PreTrainedModel, parallel: ParallelConfig) -> tuple[str, ...]:
    structure = model_structure(whole)
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = int(os.environ.get("RANK", "0")), started_processes(os.environ)
    stage = stage_of_rank(rank, world_size, parallel.pipeline_stage)
    return StagedModel(whole, structure, layout_of(structure, parallel), stage).foreign_parts()


def _unfit(name: str) -> Problem:
    return Problem(name, "no such argument beside parallel_config.schedule", "it is given", "Leave it out.")


def _on_meta(kind: Any, source: str | os.PathLike[str], how: Mapping[str, Any]) -> PreTrainedModel:
    trusts = {name: how[name] for name in ("trust_remote_code",) if name in how}
    config = how.get("config")
    if config is None:
        of_hub = {name: how[name] for name in _OF_THE_HUB if name in how}
        config = AutoConfig.from_pretrained(source, **of_hub, **trusts)
    with torch.device("meta"):
        made: PreTrainedModel = (
            kind(config) if issubclass(kind, PreTrainedModel) else kind.from_config(config, **trusts)
        )
    return made


def _opened_without(
    foreign: tuple[str, ...],
    kind: type[PreTrainedModel],
    source: Any,
    how: Mapping[str, Any],
    seed: int | None = None,
) -> PreTrainedModel:
    """Load a model without the modules at paths ``foreign``; then put these back, on ``meta``.

    Args:
        foreign: paths of the modules of other stages.
        kind, source, how: see `stage_from_pretrained`.
        seed: each module draws its weights from a seed of its own; ``None``: from the global generator.
    """
    taken: dict[str, nn.Module] = {}
    tied: dict[str, str] = {}
    absent: set[str] = set()

    @functools.wraps(kind.__init__)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        if seed is not None:
            _draw_by_name(self, seed)
            self._keys_to_ignore_on_load_missing |= {""}  # transformers would list all weights in a warning
        for path in foreign:
            taken[path] = self.get_submodule(path)
            self.set_submodule(path, nn.Identity())
        tied.update(self.all_tied_weights_keys)
        absent.update(f"{path}.{name}" for path in taken for name, _ in taken[path].named_parameters())
        self.all_tied_weights_keys = {
            name: other for name, other in tied.items() if absent.isdisjoint((name, other))
        }

    known, quiet = kind._keys_to_ignore_on_load_unexpected, {rf"^{re.escape(path)}\." for path in foreign}
    names: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__init__": construct,
        "_keys_to_ignore_on_load_unexpected": {*(known or ()), *quiet},
    }
    opening: Any = type(kind.__name__, (kind,), names)
    model: Any = opening.from_pretrained(source, **how)
    for path, module in taken.items():
        model.set_submodule(path, module)
        for name, parameter in module.named_parameters(prefix=path):  # as transformers does after loading
            if any(kept in name for kept in model._get_dtype_plan(model.dtype)):
                parameter.data = parameter.data.float()
            parameter.requires_grad_(parameter.is_floating_point())
    if seed is not None:
        model._keys_to_ignore_on_load_missing -= {""}
        for module in model.modules():
            vars(module).pop("_init_weights", None)
    model.__class__, model.all_tied_weights_keys = kind, tied
    model._keys_to_ignore_on_load_unexpected -= quiet
    if not absent.isdisjoint((*tied, *tied.values())):
        model.tie_weights()  # those on meta
    found: PreTrainedModel = model.eval()
    return found


def _draw_by_name(model: PreTrainedModel, seed: int) -> None:
    """Let each module of a model draw its first weights from a seed of its own."""
    names = {module: name for name, module in model.named_modules()}

    def drawn(draw: Callable[[nn.Module], None], module: nn.Module) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(zlib.crc32(f"{seed} {names.get(module)}".encode()))
            draw(module)

    for module in names:
        if isinstance(module, PreTrainedModel):
            vars(module)["_init_weights"] = functools.partial(drawn, module._init_weights)
