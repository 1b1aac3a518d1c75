"""Whether the model of a batch can be loaded as it is asked for."""

from __future__ import annotations

from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.model_files.deployed import pinned
from raylm.model_files.source import locate
from raylm.models import check


def check_model(config: EngineConfig, *, must_be_here: bool) -> EngineConfig:
    """As raylm.models.check does; the configuration with the commit of a model on the hub. A model that only the
    cluster's other machines have cannot be checked here; it passes unless it `must_be_here`. Raises ConfigError."""
    try:
        locate(config.model.reference)
    except ConfigError:
        if must_be_here:
            raise
        return config
    check.check_model(config)
    return pinned(config)
