"""A model without memory for its weights, as the stages of a pipeline have it: what they hold, how it can be split."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from raylm.config.engine import ParallelConfig
from raylm.models.arch import ArchConfig
from raylm.models.blocks import Build
from raylm.models.decoder import DecoderModel
from raylm.models.registry import model_class
from raylm.models.scheme import AS_NUMBERS, Scheme
from raylm.parallel.context import ParallelContext


class StageOutline(NamedTuple):
    """One stage, on the device "meta"."""

    context: ParallelContext
    model: DecoderModel


def outline(
    arch: ArchConfig, parallel: ParallelConfig, dtype: torch.dtype, scheme: Scheme = AS_NUMBERS
) -> list[StageOutline]:
    """The stages as their first tensor ranks have them; of all ranks these hold most. Raises ConfigError, as the
    workers would, when the model cannot be split so."""
    # The rotary tables take time to compute.
    arch = dataclasses.replace(arch, max_position=1)
    sizes = tuple(parallel.stage_layers) if parallel.stage_layers is not None else None
    stages = []
    for rank in range(parallel.pipeline):
        context = ParallelContext(
            rank=rank * parallel.tensor,
            tensor_rank=0,
            tensor_size=parallel.tensor,
            pipeline_rank=rank,
            pipeline_size=parallel.pipeline,
            device=torch.device("meta"),
            stage_layers=sizes,
        )
        with torch.inference_mode():
            build = Build(arch, context, dtype, scheme=scheme)
            stages.append(StageOutline(context, model_class(arch.architecture)(build)))
    return stages
