"""The description of an EAGLE-3 head (arXiv:2503.01840), from its folder. Read without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from raylm.errors import ConfigError
from raylm.model_files.source import ModelSource
from raylm.models.arch import ArchConfig
from raylm.models.fields import Fields
from raylm.models.read_json import read_json
from raylm.models.registry import read_folder_arch

_NAMES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""What `architectures` may say. Heads of the authors say LlamaForCausalLM, and are told by their draft_vocab_size."""
_NUM_TAPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Arch:
    """One EAGLE-3 head for one target model."""

    arch: ArchConfig
    """The head's one layer: a Llama's. Its vocab_size is the target's, its max_position not below the target's."""
    draft_vocab_size: int
    """Tokens that the head can draft."""
    target_hidden_size: int
    target_layers: tuple[int, ...]
    """The head reads the target's residual stream before these layers."""
    norm_before_residual: bool
    """The residual stream of the head begins with the normed hidden state, not with the hidden state itself."""


def read_eagle3_arch(source: ModelSource, target: ArchConfig) -> Eagle3Arch:
    """The description of the head in a folder. Raises ConfigError where it is none, or none for `target`."""
    if source.kind != "folder":
        raise ConfigError(f"speculation.model {source.path}: an EAGLE-3 head is a folder with config.json")
    _check_taps(target)
    path = source.path / "config.json"
    fields = Fields(read_json(path), str(path))
    names = fields.get("architectures")
    if not (isinstance(names, list) and names and names[0] in _NAMES):
        raise fields.error("architectures", names, f"an EAGLE-3 head: one of {', '.join(_NAMES)}")
    if names[0] == _NAMES[0] and fields.get("draft_vocab_size") is None:
        raise ConfigError(f"{path}: draft_vocab_size is missing: this is no EAGLE-3 head")
    arch = read_folder_arch(source.path, "LlamaForCausalLM")
    if arch.num_layers != 1:
        raise fields.error("num_hidden_layers", arch.num_layers, "1")
    if arch.vocab_size != target.vocab_size:
        raise fields.error("vocab_size", arch.vocab_size, f"{target.vocab_size}, the target's")
    target_hidden_size = fields.integer("target_hidden_size", arch.hidden_size)
    if target_hidden_size != target.hidden_size:
        name = "hidden_size" if fields.get("target_hidden_size") is None else "target_hidden_size"
        raise fields.error(name, target_hidden_size, f"{target.hidden_size}, the target's hidden_size")
    draft_vocab_size = fields.integer("draft_vocab_size", arch.vocab_size)
    if draft_vocab_size > arch.vocab_size:
        raise fields.error("draft_vocab_size", draft_vocab_size, f"at most vocab_size, {arch.vocab_size}")
    return Eagle3Arch(
        arch=dataclasses.replace(arch, max_position=max(arch.max_position, target.max_position)),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        target_layers=_target_layers(fields, target.num_layers),
        norm_before_residual=fields.flag("norm_before_residual", False),
    )


def _check_taps(target: ArchConfig) -> None:
    """A head reads what the norms before some layers are given (raylm.models.taps), in the width of its own layer."""
    if target.transformers_config:
        reason = "the model runs through transformers"
    elif target.norm_place in ("post", "after"):
        reason = "the model's layers have no norms before them, whose inputs a head reads"
    elif target.embedding_size:
        reason = f"the model's embedding has {target.embedding_size} columns, not hidden_size, {target.hidden_size}"
    else:
        return
    raise ConfigError(f"speculation.method is eagle3, but {reason}; allowed: ngram, suffix or a draft model")


def _target_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers that config.json names, or the authors' choice: an early, a middle and a late one."""
    name, section = "eagle_aux_hidden_state_layer_ids", fields.section("eagle_config")
    if section.get("use_aux_hidden_state") is False:
        raise section.error("use_aux_hidden_state", False, "true (EAGLE-3)")
    holder = fields if fields.get(name) is not None else section
    found = holder.get(name)
    if found is None:
        if num_layers < 2 * _NUM_TAPS:
            raise ConfigError(
                f"{fields.source}: {name} is missing, and the target's {num_layers} layers are too few for "
                f"layers 2, n/2 and n-3; allowed: {_NUM_TAPS} layers"
            )
        return 2, num_layers // 2, num_layers - _NUM_TAPS
    layers = holder.token_ids(name)
    if len(layers) != _NUM_TAPS or max(layers) > num_layers:
        raise holder.error(name, found, f"{_NUM_TAPS} numbers from 0 to the target's {num_layers} layers")
    return layers
