"""Whether the model of a batch can be loaded as it is asked for."""

from __future__ import annotations

from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models import check


def check_model(config: EngineConfig, *, must_be_here: bool) -> None:
    """As raylm.models.check does. A model that only the cluster's other machines have cannot be checked here; it passes
    unless it `must_be_here`. Raises ConfigError."""
    try:
        locate(config.model.path)
    except ConfigError:
        if must_be_here:
            raise
        return
    check.check_model(config)
