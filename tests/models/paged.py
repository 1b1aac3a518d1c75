"""Drives a DecoderModel as a scheduler would: chunks of several sequences in one batch, blocks in no order."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from raylm.config.engine import Implementation
from raylm.layers.attention import AttentionMetadata, LayerInput
from raylm.layers.heads import kv_heads_of_rank
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderModel
from raylm.models.load import load_model
from raylm.parallel.context import ParallelContext

CPU = torch.device("cpu")


def load(
    path: str | Path,
    load_format: str = "auto",
    context: ParallelContext | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    implementation: Implementation = "auto",
    as_stored: bool = False,
    quantise: bool = False,
    cache_codes: bool = False,
    measure_cache: bool = False,
    seed: int = 0,
) -> DecoderModel:
    """A model on the CPU."""
    source = locate(str(path))
    context = context or ParallelContext.single(CPU)
    arch = ArchConfig.from_source(source, implementation)
    how = {"as_stored": as_stored, "quantise": quantise, "seed": seed, "progress": False}
    how |= {"cache_codes": cache_codes, "measure_cache": measure_cache}
    return load_model(source, arch, context, dtype, load_format, **how)


class PagedRun:
    """Sequences of one model over one paged cache, on the model's device. What no step has written is NaN, so that
    reading it shows."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        arch = model.arch
        shape = (num_blocks, block_size, kv_heads_of_rank(arch.num_kv_heads, model.context), arch.head_dim)
        self._device = model.context.device
        unwritten = torch.full(shape, torch.nan, device=self._device).to(dtype)
        self.caches = [(unwritten.clone(), unwritten.clone()) for _ in range(arch.num_layers)]
        self._model = model
        self._block_size = block_size
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        self._blocks: dict[str, list[int]] = {}
        self._num_computed: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, chunks: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Compute some tokens of some sequences; the logits [num_tokens, vocab_size] of each."""
        lens = [len(tokens) for tokens in chunks.values()]
        positions, slots = [], []
        for name, tokens in chunks.items():
            first = self._num_computed.get(name, 0)
            self._num_computed[name] = first + len(tokens)
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self._block_size < first + len(tokens):
                blocks.append(self._free.pop())
            for position in range(first, first + len(tokens)):
                positions.append(position)
                slots.append(blocks[position // self._block_size] * self._block_size + position % self._block_size)
        logits = self._run(chunks, lens, positions, slots)
        return dict(zip(chunks, logits.split(lens), strict=True))

    def _run(self, chunks: dict[str, list[int]], lens: list[int], positions: list[int], slots: list[int]):
        seq_lens = [self._num_computed[name] for name in chunks]
        width = max(len(self._blocks[name]) for name in chunks)
        table = [self._blocks[name] + [0] * (width - len(self._blocks[name])) for name in chunks]
        meta = AttentionMetadata(
            query_start=torch.tensor([0, *lens]).cumsum(0).int().to(self._device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self._device),
            block_table=torch.tensor(table, dtype=torch.int32, device=self._device),
            slot_mapping=torch.tensor(slots, device=self._device),
            max_query_len=max(lens),
            max_seq_len=max(seq_lens),
        )
        tokens = torch.tensor([token for chunk in chunks.values() for token in chunk], device=self._device)
        places = torch.tensor(positions, device=self._device)
        hidden = self._model(tokens, [LayerInput(places, cache, meta) for cache in self.caches])
        return self._model.logits(hidden)


def generate(run: PagedRun, prompts: dict[str, list[int]], num_tokens: int) -> tuple[dict, dict]:
    """Greedy texts, each prompt in two chunks, prompts joining one step after another while others decode.

    Returns every sequence's tokens (prompt and output), and the logits [num_tokens, vocab_size] of all but the last.
    """
    texts = {name: list(prompt) for name, prompt in prompts.items()}
    logits = {name: torch.empty(0) for name in prompts}
    halves = {name: [len(prompt) // 2, len(prompt) - len(prompt) // 2] for name, prompt in prompts.items()}
    todo = {name: [count for count in counts if count] for name, counts in halves.items()}
    starts = {name: 0 for name in prompts}
    goal = {name: len(prompt) + num_tokens for name, prompt in prompts.items()}
    for step in range(1000):
        chunks = {}
        for index, name in enumerate(prompts):
            if index <= step and len(texts[name]) < goal[name]:
                count = todo[name].pop(0) if todo[name] else 1
                chunks[name] = texts[name][starts[name] : starts[name] + count]
                starts[name] += count
        if not chunks:
            break
        for name, found in run.step(chunks).items():
            logits[name] = torch.cat([logits[name], found])
            if starts[name] == len(texts[name]):
                texts[name].append(int(found[-1].argmax()))
    return texts, logits
