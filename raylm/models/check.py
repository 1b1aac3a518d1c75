"""What can be said of a model on disk before anything is loaded. torch is imported only where it is to be split."""

from __future__ import annotations

import dataclasses

from raylm.config.engine import EngineConfig, ModelConfig
from raylm.config.speculation import SpeculationConfig
from raylm.errors import ConfigError
from raylm.model_files.source import ModelSource, locate
from raylm.model_files.weight_files import weight_files
from raylm.models.arch import ArchConfig
from raylm.models.arch_eagle3 import read_eagle3_arch

_FORMATS = {"gguf": ("gguf",), "folder": ("safetensors", "mistral", "pt")}
"""Kind of source -> the formats that its weights may have."""


def check_model(config: EngineConfig) -> ArchConfig:
    """The model's description. Raises ConfigError where it is none that raylm runs, its weights are not there (a model
    on the hub has them there, and none is downloaded), or `parallel` cannot split it."""
    source = locate(config.model.reference)
    arch = target_arch(ArchConfig.from_source(source, config.model.implementation), config)
    check_format(source, config.model.load_format)
    if source.remote is None and config.model.load_format != "dummy":
        weight_files(source, config.model.load_format)
    if config.parallel.num_workers > 1:
        import torch

        from raylm.models.outline import outline

        outline(arch, config.parallel, torch.bfloat16)
    return arch


def target_arch(arch: ArchConfig, config: EngineConfig) -> ArchConfig:
    """The architecture for sequences of model.max_model_len, with what speculative decoding loads of it. Raises
    ConfigError where it cannot draft so, what is to draft for it is nowhere or not for it, it is not quantised as
    model.quantization says, or it cannot be computed as runtime.deterministic wants."""
    _check_quantisation(arch, config.model)
    if config.runtime.deterministic:
        _check_deterministic(arch, config)
    return _with_drafting(_up_to(arch, config.model.max_model_len), config.speculation)


def quantises(arch: ArchConfig, config: ModelConfig) -> bool:
    """Whether linear layers are quantised to FP8 while they are loaded: the checkpoint's are not quantised."""
    return config.quantization == "fp8" and arch.quantisation is None


def _check_quantisation(arch: ArchConfig, config: ModelConfig) -> None:
    wanted = config.quantization
    found = arch.quantisation.method if arch.quantisation is not None else None
    if wanted is not None and wanted != found and not quantises(arch, config):
        allowed = found or "fp8, to which raylm quantises it while it is loaded: the checkpoint is not quantised"
        raise ConfigError(f"model.quantization is {wanted}; allowed for this model: {allowed}")
    if quantises(arch, config) and config.weights == "decoded":
        raise ConfigError(
            f"model.weights is {config.weights}, but model.quantization is fp8, which quantises this model's weights "
            "while they are loaded; allowed with it: stored"
        )


def _check_deterministic(arch: ArchConfig, config: EngineConfig) -> None:
    """What of a model gives a row other bits among other rows; GPUs' kernels are looked at where there is a GPU."""
    model, tensor = config.model, config.parallel.tensor
    if arch.transformers_config:
        raise ConfigError(
            "runtime.deterministic is true, but this model runs through transformers, whose modules sum in an order "
            "that depends on the step; allowed for it: false"
        )
    if quantises(arch, model):
        raise ConfigError(
            "model.quantization is fp8, but runtime.deterministic is true; allowed with it: weights that are not "
            "quantised while they are loaded"
        )
    if arch.quantisation is not None and arch.quantisation.of_weights and model.weights == "stored":
        raise ConfigError(
            f"model.weights is stored, but runtime.deterministic is true and this checkpoint is quantised "
            f"({arch.quantisation}); allowed with it: decoded"
        )
    if arch.qk_norm == "all_heads" and tensor > 1:
        raise ConfigError(
            f"parallel.tensor is {tensor}, but runtime.deterministic is true and this model norms the heads of all "
            "ranks together; allowed for it: 1"
        )


def _up_to(arch: ArchConfig, wanted: int | None) -> ArchConfig:
    """Some rotary embeddings depend on how long sequences may be."""
    if wanted is not None and wanted > arch.max_position:
        raise ConfigError(f"model.max_model_len {wanted} is over the model's own limit of {arch.max_position}")
    return arch if wanted is None else dataclasses.replace(arch, max_position=wanted)


def _with_drafting(arch: ArchConfig, speculation: SpeculationConfig) -> ArchConfig:
    if speculation.method == "mtp":
        return with_mtp(arch)
    if speculation.model is not None:
        source = locate(speculation.model, field="speculation.model")
        if speculation.method == "eagle3":
            read_eagle3_arch(source, arch)
        else:
            ArchConfig.from_source(source)
    return arch


def with_mtp(arch: ArchConfig) -> ArchConfig:
    """The architecture with its MTP layer loaded. Raises ConfigError where it has none, or several."""
    if arch.mtp_layers != 1:
        raise ConfigError(
            f"speculation.method is mtp, but this {arch.architecture} has {arch.mtp_layers} MTP layers "
            "(num_nextn_predict_layers); allowed: a MiMoForCausalLM with 1"
        )
    return dataclasses.replace(arch, uses_mtp=True)


def check_format(source: ModelSource, load_format: str) -> None:
    """Raises ConfigError when the source's weights are of another format than `load_format`, a LoadFormat."""
    native = _FORMATS[source.kind]
    if load_format not in ("auto", "dummy", *native):
        allowed = ", ".join(("auto", "dummy", *native))
        raise ConfigError(f"model.load_format is {load_format!r}, but {source.path} allows: {allowed}")
