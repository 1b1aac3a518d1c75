"""The tensors of a quantised checkpoint, parts joined to the weights that they are of."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

import torch

from raylm.errors import ConfigError
from raylm.layers.slots import SlotName
from raylm.log import get_logger
from raylm.models.checkpoint import CheckpointTensor, FileTensor, Source
from raylm.models.quantised import flattened
from raylm.models.quantised.joined import QuantisedTensor
from raylm.models.quantised.layouts import LAYOUTS
from raylm.models.quantised.parts import FLOATS, Parts
from raylm.models.quantised.patterns import Schemes
from raylm.models.quantised.scheme import Quantisation

logger = get_logger(__name__)

WEIGHT = "weight"
_PARTS = {
    WEIGHT,
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
    *("weight_zero_point", "weight_g_idx", "weight_shape"),
    *("qweight", "qzeros", "scales", "g_idx"),
    *("SCB", "weight_format"),
    *(f"weight.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")),
    *(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")),
}
"""Ends of tensors' names: what a quantised weight may be stored as."""
_MOST_WORDS = 3
_ACTIVATIONS = (
    *("input_scale", "input_global_scale", "input_zero_point", "input_scale_ub"),
    *("activation_scale", "act_scale"),
    *("output_scale", "output_zero_point"),
    *flattened.UNUSED,
)
"""The same of scales by which activations would be quantised: here they have 16 bits, or each token its own scale."""
_CACHE = (
    *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"),
    *("k_zero_point", "v_zero_point", "q_zero_point"),
    *("k_proj.output_scale", "v_proj.output_scale"),
)
"""The same of scales of a quantised KV cache: models/cache_scales.py reads those that have a use."""
_CACHE_ENDS = tuple(f".{name}" for name in _CACHE)


def join(tensors: Iterable[CheckpointTensor], quantisation: Quantisation) -> list[FileTensor]:
    """Every tensor that a model may have, quantised weights among them by the name of the weight.

    Raises ConfigError naming the tensor that is missing, or is not as the quantisation says.
    """
    tensors = list(tensors)
    found: list[FileTensor] = []
    modules: dict[str, dict[str, CheckpointTensor]] = {}
    num_of_cache = 0
    for tensor in tensors:
        if tensor.name.endswith(_CACHE_ENDS):
            num_of_cache += 1
        elif tensor.name.rpartition(".")[2] not in _ACTIVATIONS:
            module, part = _split(tensor.name)
            if part is None:
                found.append(_plain(tensor))
            elif part in (own := modules.setdefault(module, {})):
                raise ConfigError(f"{tensor.path}: tensor {tensor.name} is there twice")
            else:
                own[part] = tensor
    parts_of = _told(tensors) if quantisation.in_files else _configured(Schemes(quantisation))
    found += [_joined(module, own, parts_of) for module, own in modules.items()]
    if num_of_cache:
        logger.info("weights: %d scales of a quantised KV cache are for cache.dtype fp8 alone", num_of_cache)
    return found


def _split(name: str) -> tuple[str, str | None]:
    """The module, and which part of its weight the tensor is; None: none."""
    words = name.split(".")
    if (flat := flattened.PARTS.get(words[-1])) is not None:
        return ".".join(words[:-1]), flat
    for count in range(min(_MOST_WORDS, len(words) - 1), 0, -1):
        if (part := ".".join(words[-count:])) in _PARTS:
            return ".".join(words[:-count]), part
    return name, None


_PartsOf = Callable[[str, dict[str, CheckpointTensor]], Parts]
"""A module and its tensors -> these as parts of a weight that is stored in a known way. Raises ConfigError where
nothing says how."""


def _configured(schemes: Schemes) -> _PartsOf:
    """As the configuration says it."""

    def parts_of(module: str, tensors: dict[str, CheckpointTensor]) -> Parts:
        scheme = schemes.of_stored(module)
        if scheme is None:
            raise _unknown(tensors, "the configuration")
        return Parts(module, tensors, scheme)

    return parts_of


def _told(tensors: list[CheckpointTensor]) -> _PartsOf:
    """As the files say it."""
    told = flattened.read_told(tensors)

    def parts_of(module: str, own: dict[str, CheckpointTensor]) -> Parts:
        if module not in told:
            raise _unknown(own, "the metadata of the files")
        return Parts(module, own, *told[module])

    return parts_of


def _unknown(tensors: dict[str, CheckpointTensor], place: str) -> ConfigError:
    tensor = next(iter(tensors.values()))
    return ConfigError(f"{tensor.path}: tensor {tensor.name} is quantised, but {place} does not say how")


def _joined(module: str, tensors: dict[str, CheckpointTensor], parts_of: _PartsOf) -> FileTensor:
    weight = tensors.get(WEIGHT)
    if weight is not None and len(tensors) == 1 and weight.encoding.dtype in FLOATS:
        return weight
    parts = parts_of(module, tensors)
    decoder, main = LAYOUTS[parts.scheme.layout](parts)
    parts.finish()
    name, scheme = f"{module}.{WEIGHT}", parts.scheme
    return QuantisedTensor(name=name, shape=decoder.shape, decoder=decoder, scheme=scheme, main=main)


def _plain(tensor: CheckpointTensor) -> CheckpointTensor:
    if tensor.encoding.dtype not in FLOATS:
        kind = str(tensor.encoding.dtype).removeprefix("torch.")
        allowed = ", ".join(str(each).removeprefix("torch.") for each in FLOATS)
        raise ConfigError(f"{tensor.path}: tensor {tensor.name} has type {kind}; allowed: {allowed}")
    return tensor


def drop_zero_biases(found: dict[SlotName, list[Source]], slots: Container[SlotName]) -> None:
    """Leave out biases that the model has not, if they are 0: AutoGPTQ gave every layer one."""
    for name in [name for name in found if name not in slots and name[0].endswith(".bias")]:
        if not any(bool(torch.count_nonzero(piece)) for tensor in found[name] for _, piece in _all(tensor)):
            del found[name]


def _all(tensor: Source) -> Iterator[tuple[int, torch.Tensor]]:
    return tensor.pieces(0, tensor.shape[0])
