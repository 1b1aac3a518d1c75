"""The sampling that a model's authors advise: its generation_config.json, or what raylm knows of the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from raylm.config.base import parse
from raylm.config.demo import DEMO_MODELS
from raylm.config.engine import EngineConfig
from raylm.config.hub_name import hub_name
from raylm.config.sampling import SamplingConfig, SamplingDefaults
from raylm.errors import ConfigError
from raylm.model_files.source import locate

FILE = "generation_config.json"


class Advice(NamedTuple):
    """Advised defaults, and where they come from, or why there are none."""

    sampling: SamplingConfig
    origin: str


def sampling_defaults(config: EngineConfig) -> SamplingDefaults:
    """How requests are sampled that leave it open. Raises ConfigError as sampling_advice does."""
    return SamplingDefaults.of(config.model.sampling, sampling_advice(config).sampling)


def sampling_advice(config: EngineConfig) -> Advice:
    """Defaults that generation.defaults takes from the model. A missing folder advises nothing; its loading reports it.

    Raises ConfigError where generation_config.json holds a value that is no possible default, or a model of the hub
    is not there.
    """
    if config.generation.defaults == "neutral":
        return Advice(SamplingConfig(), "generation.defaults is neutral")
    return _of_model(config.model.reference)


def _of_model(path: str) -> Advice:
    demo = DEMO_MODELS.get(path)
    if demo is not None:
        return Advice(demo.sampling, f"advised by the authors of {path}")
    is_remote = "://" in path or hub_name(path) is not None
    place = locate(path).path if is_remote else Path(path).expanduser()
    if place.suffix == ".gguf":
        return Advice(SamplingConfig(), "a GGUF file advises none")
    file = place / FILE
    if not file.is_file():
        return Advice(SamplingConfig(), f"the model has no {FILE}")
    return Advice(_read(file), FILE)


def _read(file: Path) -> SamplingConfig:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {data!r:.100}")
    known = {name: data[name] for name in SamplingConfig.model_fields if name in data}
    try:
        return parse(SamplingConfig, known, source=str(file))
    except ConfigError as error:
        raise ConfigError(f"{error} (with generation.defaults: neutral this file is not read)") from None
