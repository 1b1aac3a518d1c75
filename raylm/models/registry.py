"""The models that raylm knows: each family is a line here and a file of raylm.models.families."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raylm.config.engine import Implementation
from raylm.errors import ConfigError
from raylm.models.arch import ArchConfig
from raylm.models.families.through_transformers import THROUGH_TRANSFORMERS, transformers_has
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.quantised.read_config import FIELD, read_quantisation
from raylm.models.read_folder import eos_token_ids, refuse_unsupported
from raylm.models.read_gguf import open_header
from raylm.models.read_json import read_json
from raylm.models.read_params import params_as_config
from raylm.plugins import load_plugins

if TYPE_CHECKING:
    from raylm.models.decoder import DecoderModel

_FAMILIES = (
    "llama",
    "mistral",
    "qwen",
    "mimo",
    "gemma",
    "gemma3",
    "granite",
    "smollm3",
    "phi3",
    "exaone",
    "exaone4",
    "starcoder2",
    "stablelm",
    "olmo2",
    "cohere",
    "falcon",
    "gpt_neox",
    "gpt2",
    "opt",
    "bloom",
    "nemotron",
    "glm",
    "internlm",
    "minicpm",
    "baichuan",
    "mixtral",
    "qwen_moe",
    "olmoe",
    "granite_moe",
    "glm4_moe",
    "gpt_oss",
    "phimoe",
    "through_transformers",
)


@functools.cache
def families() -> dict[str, Family]:
    """Every architecture, by its name in config.json; those of plug-ins last. Raises ConfigError for a plug-in that is
    no mapping of names to families, or has one that is there."""
    modules = [importlib.import_module(f"raylm.models.families.{name}") for name in _FAMILIES]
    found = {name: family for module in modules for name, family in module.ARCHITECTURES.items()}
    for plugin, architectures in load_plugins("raylm.models").items():
        if not isinstance(architectures, dict) or not all(isinstance(each, Family) for each in architectures.values()):
            raise ConfigError(
                f"the plug-in {plugin!r} (raylm.models) is {architectures!r}; allowed: a dict of families"
            )
        if taken := sorted(found.keys() & architectures.keys()):
            raise ConfigError(f"the plug-in {plugin!r} (raylm.models) has {taken[0]!r}, which raylm has")
        found |= architectures
    return found


def family_of(architecture: str) -> Family:
    """Raises ConfigError naming the allowed ones."""
    if architecture not in families():
        raise ConfigError(f"architecture is {architecture!r}; allowed: one of {', '.join(families())}")
    return families()[architecture]


def model_class(architecture: str) -> type[DecoderModel]:
    """The class of an architecture. Raises ConfigError naming the allowed ones."""
    module, _, name = family_of(architecture).model.partition(":")
    found: type[DecoderModel] = getattr(importlib.import_module(module), name)
    return found


def read_folder_arch(
    folder: Path, architecture: str | None = None, *, implementation: Implementation = "auto"
) -> ArchConfig:
    """The description of the model in a folder, read as `architecture` or as what config.json names; where there is
    none, as Mistral's params.json says. `implementation` as in the configuration.

    Raises ConfigError.
    """
    path, native = folder / "config.json", folder / "params.json"
    if native.is_file() and not path.is_file():
        path, values = native, params_as_config(native)
    else:
        values = read_json(path)
    if architecture is None:
        architecture = _architecture(values, path, implementation)
    family = family_of(architecture)
    if isinstance(text := values.get("text_config"), dict):
        values = {**values, **{name: value for name, value in text.items() if value is not None}}
    values |= {name: values[own] for own, name in family.field_names.items() if values.get(own) is not None}
    fields = Fields(values, str(path), family.defaults)
    refuse_unsupported(fields)
    quantisation = read_quantisation(fields, folder, mxfp4=family.names.packed)
    # The other fields say what the model is, however its weights are stored.
    fields = Fields({name: value for name, value in values.items() if name != FIELD}, str(path), family.defaults)
    return replace(
        family.read(fields),
        architecture=architecture,
        eos_token_ids=eos_token_ids(fields, folder),
        quantisation=quantisation,
    )


def _architecture(values: Mapping[str, object], path: Path, implementation: Implementation) -> str:
    """What the model is read as."""
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    own = [each for each in families() if each != THROUGH_TRANSFORMERS]
    if name in own and implementation != "transformers":
        return str(name)
    if implementation != "raylm" and name is not None and transformers_has(values):
        return THROUGH_TRANSFORMERS
    if implementation == "transformers":
        raise ConfigError(
            f"model.implementation is transformers, but {path}: architectures is {names!r}, which is no causal "
            "language model of the installed transformers"
        )
    raise ConfigError(f"{path}: architectures is {names!r}; allowed: one of {', '.join(own)}")


def read_gguf_arch(path: Path) -> ArchConfig:
    """The description of the model in a GGUF file. Raises ConfigError."""
    readers = {own: (name, read) for name, family in families().items() for own, read in family.gguf.items()}
    header = open_header(path, list(readers))
    architecture, read = readers[header.name]
    return replace(read(header), architecture=architecture)
