"""Structured output against plain sampling: the same requests in turns, by one engine."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

from raylm.bench.cases import prompt_token_ids
from raylm.bench.report import StructureResult
from raylm.bench.schemas import mixed_schemas
from raylm.config.engine import EngineConfig
from raylm.core.sampling import SamplingParams
from raylm.core.structure import StructuredOutput
from raylm.llm import LLM

_SEED = 16
_SAMPLING = SamplingParams(temperature=1.0, seed=_SEED)


def measure_structure(
    config: EngineConfig, *, schemas: int, streams: int, input_len: int, max_tokens: int, repeat: int
) -> StructureResult:
    """One request for each of `schemas` JSON schemas, at most `streams` at a time, and the same without: as many plain
    requests of the same prompts and the same numbers of tokens. Raises ConfigError."""
    update = {
        "scheduler": config.scheduler.model_copy(update={"max_num_seqs": streams}),
        # A prompt comes many times.
        "cache": config.cache.model_copy(update={"prefix_caching": False}),
    }
    llm = LLM(config.model_copy(update=update), progress=False)
    try:
        rng = random.Random(_SEED)
        token_ids = prompt_token_ids(llm.info.vocab_size, llm.info.eos_token_ids)
        prompts = [rng.choices(token_ids, k=input_len) for _ in range(schemas)]
        wanted = [
            replace(_SAMPLING, max_tokens=max_tokens, structure=StructuredOutput("json_schema", json.dumps(schema)))
            for schema in mixed_schemas(schemas)
        ]
        # Compiles the grammars too, which are kept.
        lengths = _run(llm, prompts, wanted)[1]
        runs: list[tuple[float, float, int]] = []
        _run(llm, prompts, _plain(lengths))
        for _ in range(repeat):
            constrained, lengths = _run(llm, prompts, wanted)
            plain, _ = _run(llm, prompts, _plain(lengths))
            runs.append((constrained, plain, sum(lengths)))
    finally:
        llm.close()
    return StructureResult(
        bench="structure",
        model=config.model.served_name,
        schemas=schemas,
        streams=streams,
        output_len_mean=median(tokens / schemas for _, _, tokens in runs),
        tokens_per_s=median(tokens / seconds for seconds, _, tokens in runs),
        plain_tokens_per_s=median(tokens / seconds for _, seconds, tokens in runs),
        time_ratio=median(constrained / plain for constrained, plain, _ in runs),
    )


def _plain(lengths: Sequence[int]) -> list[SamplingParams]:
    return [replace(_SAMPLING, max_tokens=length, ignore_eos=True) for length in lengths]


def _run(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> tuple[float, list[int]]:
    """Seconds of a batch, and how many tokens each of its requests gave."""
    start = perf_counter()
    completions = llm.generate(list(prompts), list(params), progress=False)
    seconds = perf_counter() - start
    return seconds, [len(completion.outputs[0].token_ids) for completion in completions]
