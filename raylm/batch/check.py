"""Whether the model of a batch can be loaded as it is asked for, told from its description alone."""

from __future__ import annotations

import dataclasses

from raylm.config.engine import EngineConfig
from raylm.config.source import locate
from raylm.errors import ConfigError


def check_model(config: EngineConfig, *, must_be_here: bool) -> None:
    """Find the model and build every stage of it without memory: its architecture and sizes must go with `parallel`.

    A model that only the cluster's other machines have cannot be checked here; it passes unless it `must_be_here`.
    Raises ConfigError.
    """
    try:
        source = locate(config.model.path)
    except ConfigError:
        if must_be_here:
            raise
        return
    import torch

    from raylm.models.arch import ArchConfig
    from raylm.models.registry import model_class
    from raylm.parallel.context import ParallelContext

    # The rotary tables take time to compute.
    arch = dataclasses.replace(ArchConfig.from_source(source), max_position=1)
    make = model_class(arch.architecture)
    wanted = config.parallel
    for stage in range(wanted.pipeline):
        first = ParallelContext(
            rank=stage * wanted.tensor,
            tensor_rank=0,
            tensor_size=wanted.tensor,
            pipeline_rank=stage,
            pipeline_size=wanted.pipeline,
            device=torch.device("meta"),
            stage_layers=tuple(wanted.stage_layers) if wanted.stage_layers is not None else None,
        )
        make(arch, first, torch.float32)
