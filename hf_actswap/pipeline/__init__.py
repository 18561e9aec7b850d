"""Pipeline parallelism: stages of an unmodified model, and the schedules that run them.

In: a model and its structure, the layout of layers over stages, and batches. Out: losses, and gradients on
each stage's own parameters. The schedules are those of `torch.distributed.pipelining`.
"""

from .runtime import PipelineRuntime, StageGradients, gathered_on_first_rank, whole_state
from .stages import PipelineError, StagedModel, check_cut, record_layer_outputs

__all__ = [
    "PipelineError",
    "PipelineRuntime",
    "StageGradients",
    "StagedModel",
    "check_cut",
    "gathered_on_first_rank",
    "record_layer_outputs",
    "whole_state",
]
