"""What is settled about a model's files when it is deployed, before other machines look for them by themselves."""

from __future__ import annotations

from raylm.config.demo import DEMO_MODELS
from raylm.config.engine import EngineConfig
from raylm.config.hub_name import hub_name
from raylm.model_files.source import locate
from raylm.model_files.weight_files import weight_files


def pinned(config: EngineConfig) -> EngineConfig:
    """The configuration with the commit that each model of the hub is at now, so that all machines load the same files,
    whenever they start. Models in folders stay as they are. Raises ConfigError where a model is nowhere."""
    model, speculation = config.model, config.speculation
    name = model.reference if _moves(model.path) else None
    if name is not None and (remote := locate(name).remote) is not None:
        given = hub_name(model.path)
        path = model.path if given is None else str(given._replace(revision=None))
        model = model.model_copy(update={"path": path, "name": model.served_name, "revision": remote.revision})
    if speculation.model is not None and _moves(speculation.model):
        drafts = locate(speculation.model, field="speculation.model").remote
        given = hub_name(speculation.model)
        if drafts is not None and given is not None:
            pinned_name = str(given._replace(revision=drafts.revision))
            speculation = speculation.model_copy(update={"model": pinned_name})
    return config.model_copy(update={"model": model, "speculation": speculation})


def bring_weights(config: EngineConfig) -> None:
    """Download what the workers of this machine will read: the weights of the model and of the one that drafts, where
    they are not here. Raises ConfigError."""
    if config.model.load_format == "dummy":
        return
    weight_files(locate(config.model.reference), config.model.load_format)
    if config.speculation.model is not None:
        weight_files(locate(config.speculation.model, field="speculation.model"))


def _moves(path: str) -> bool:
    return path not in DEMO_MODELS and hub_name(path) is not None
