"""Scales of keys and values, measured at the start, for a KV cache of 8-bit floats.

The model runs once over a fixed text, with a cache of numbers that lasts for this run. What lies in that cache
afterwards is what the layers store: its largest magnitudes give the scales.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.attention import AttentionMetadata, CacheScales, KVCache, LayerInput
from raylm.layers.heads import kv_heads_of_rank
from raylm.log import get_logger
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderModel
from raylm.parallel import collectives

logger = get_logger(__name__)

_SEQUENCES = 8
_LENGTH = 128
"""Tokens of a sequence, fewer where the model takes no more."""
_STRIDE = 0x9E3779B1
"""2**32 over the golden ratio: its multiples modulo 2**32 are spread evenly, however many there are."""
_BLOCK_SIZE = 16
_HEADROOM = 4.0
"""Other texts have larger keys and values than the one that is measured. SmolLM2-135M, layer by layer: up to 1.4 times
as large keys and 1.7 times as large values in 4,096 tokens of documentation and code. What is cut off is wrong by much;
small numbers lose digits only where they are 2**-11 of the largest or less."""
_LEAST_EXPONENT = -64
"""Of a scale: what kernels divide by it stays within float32."""


def measure_scales(model: DecoderModel) -> None:
    """Set the scales of this stage's layers by what they store of a fixed text. Layers that have scales from the
    checkpoint keep them.

    Collective: every rank calls it, once the weights are there, before the model runs and before a CUDA graph holds
    one of its layers. Scales are equal on all tensor ranks, and on every replica: they are powers of two, so that last
    digits of other kernels or ranks change them only where a magnitude is next to one. Raises ConfigError where keys or
    values are no finite numbers.
    """
    stored = model.cache_scales
    if len(stored) == model.arch.num_layers:
        return
    model.scale_cache({})  # a cache of numbers has none
    found = _magnitudes(model)
    measured: dict[int, CacheScales] = {}
    for number, (keys, values) in zip(model.layer_numbers, found.tolist(), strict=True):
        if number not in stored:
            measured[number] = CacheScales(_scale(keys, number, "keys"), _scale(values, number, "values"))
    model.scale_cache({**stored, **measured})
    if measured:  # another stage may have all layers that are
        scales = [scale for of_layer in measured.values() for scale in of_layer]
        logger.info(
            "KV cache: fp8, with measured scales in %d of %d layers, from %g to %g",
            *(len(measured), len(model.layer_numbers), min(scales), max(scales)),
        )


def calibration_text(arch: ArchConfig) -> list[list[int]]:
    """Token ids that are spread over the vocabulary, after the token that begins a text where the model has one.

    They follow from `arch` alone: a worker has no tokenizer, and all replicas must measure the same.
    """
    length = min(_LENGTH, arch.max_position)
    ids = [(index * _STRIDE % 2**32) * arch.vocab_size >> 32 for index in range(_SEQUENCES * length)]
    text = [ids[first : first + length] for first in range(0, len(ids), length)]
    if arch.bos_token_id is not None and arch.bos_token_id < arch.vocab_size:
        text = [[arch.bos_token_id, *sequence[1:]] for sequence in text]
    return text


@torch.inference_mode()
def _magnitudes(model: DecoderModel) -> Tensor:
    """The largest key and value of each layer of this stage, over all tensor ranks: float32 [layers, 2]."""
    text, device, links = calibration_text(model.arch), model.context.device, model.context.links
    length = len(text[0])
    num_tokens = len(text) * length
    blocks = -(-length // _BLOCK_SIZE)
    caches = [_empty_cache(model, len(text) * blocks) for _ in model.layer_numbers]
    table = torch.arange(len(text) * blocks, dtype=torch.int32, device=device).view(len(text), blocks)
    offsets = torch.arange(length, device=device)
    starts = torch.arange(len(text), device=device).unsqueeze(1) * blocks * _BLOCK_SIZE
    meta = model.attention.plan(
        AttentionMetadata(
            query_start=torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=device),
            seq_lens=torch.full((len(text),), length, dtype=torch.int32, device=device),
            block_table=table,
            slot_mapping=(starts + offsets).flatten(),
            max_query_len=length,
            max_seq_len=length,
        )
    )
    if model.context.is_first_stage:
        given = torch.tensor(text, device=device).flatten()
    else:
        assert links is not None, "stages have links"
        given = links.receive_hidden(num_tokens, model.arch.hidden_size, model.dtype)
    hidden = model(given, [LayerInput(offsets.repeat(len(text)), cache, meta) for cache in caches])
    if not model.context.is_last_stage:
        assert links is not None, "stages have links"
        links.send_hidden(hidden)
    found = [[torch.linalg.vector_norm(part, torch.inf, dtype=torch.float32) for part in cache] for cache in caches]
    return collectives.largest(torch.stack([torch.stack(of_layer) for of_layer in found]), model.context)


def _empty_cache(model: DecoderModel, num_blocks: int) -> KVCache:
    """Keys and values of a layer. Slots that no token fills are 0."""
    arch = model.arch
    shape = (num_blocks, _BLOCK_SIZE, kv_heads_of_rank(arch.num_kv_heads, model.context), arch.head_dim)
    return tuple(torch.zeros(shape, dtype=model.dtype, device=model.context.device) for _ in range(2))


def _scale(magnitude: float, number: int, what: str) -> float:
    """The least power of two that gives so large a number a code, with headroom; 1 where there is nothing to scale."""
    if not math.isfinite(magnitude):
        raise ConfigError(
            f"cache.scales is measured, but layer {number} has {what} that are no finite numbers ({magnitude:g}) for "
            "the text that is measured; allowed for this model: checkpoint, or cache.dtype auto"
        )
    if magnitude == 0:
        return 1.0
    exponent = math.ceil(math.log2(_HEADROOM * magnitude / torch.finfo(ops.CODES).max))
    return 2.0 ** max(exponent, _LEAST_EXPONENT)
