"""raylm against transformers: the same cases, weights, precision and threads, in the same process, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from raylm.bench.cases import Case, Dataset
from raylm.bench.offline import (
    Mode,
    RaylmRunner,
    Runner,
    TokenRequest,
    Workload,
    check_count,
    measure,
    result_of,
    warm_up,
)
from raylm.bench.report import CompareResult, OfflineResult
from raylm.errors import ConfigError, RaylmError
from raylm.model_files.source import ModelSource

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

    from raylm.llm import LLM

_PAD = 0
_NO_TOKEN = -1
_RESULT_TIMEOUT_S = 1.0


class GenerateRunner:
    """`model.generate` on one static batch: prompts padded on the left, steps until the longest output is complete.

    Shorter outputs are only counted up to what was asked for: the surplus is what a static batch costs.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model = model
        self.name = name

    def run(self, requests: Sequence[TokenRequest]) -> float:
        import torch

        start = perf_counter()
        longest = max(own.output_len for own in requests)
        ids, mask = _left_padded([own.prompt_ids for own in requests], self._model.device)
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=mask, generation_config=_config(longest))
        check_count(self.name, output.shape[1] - ids.shape[1], longest)
        return perf_counter() - start


class GenerateBatchRunner:
    """transformers' continuous batching, each request with its own length.

    It drives the manager behind `model.generate_batch`, which itself takes one length for all requests, and keeps it
    from the warm-up on, so that its set-up is not measured.
    """

    name = "generate_batch"

    def __init__(self, model: PreTrainedModel, largest: Sequence[TokenRequest]) -> None:
        """`largest` is the largest batch to come: the cache is made for it, else it takes most of the memory."""
        from transformers import ContinuousBatchingConfig

        self._model = model
        page = ContinuousBatchingConfig().page_size
        pages = sum(-(-(len(own.prompt_ids) + own.output_len) // page) + 1 for own in largest)
        self._batching = ContinuousBatchingConfig(num_blocks=pages)

    def run(self, requests: Sequence[TokenRequest]) -> float:
        config = _config(max(own.output_len for own in requests), eos_token_id=_NO_TOKEN)
        with self._model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=self._batching, persistent_manager=True
        ) as manager:
            start = perf_counter()
            asked = {
                manager.add_request(own.prompt_ids, max_new_tokens=own.output_len): own.output_len for own in requests
            }
            while asked:
                result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
                if result is None:
                    if not manager.is_running():
                        raise RaylmError("its generation thread ended before the requests did")
                    continue
                if result.error is not None:
                    raise RaylmError(f"it failed a request: {result.error}")
                if result.is_finished():
                    check_count(self.name, len(result.generated_tokens), asked.pop(result.request_id))
            return perf_counter() - start


def load_reference(source: ModelSource, *, dtype: str, device: str) -> PreTrainedModel:
    """The model in transformers, from the same file. Raises ConfigError where a GGUF file leaves weights unset."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    precision: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    if source.kind == "folder":
        model = AutoModelForCausalLM.from_pretrained(str(source.path), dtype=precision, local_files_only=True)
        return _without_end(model, device)
    # from_pretrained(gguf_file=...) wants the package accelerate; the parts it is made of do not.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(source.path.parent), gguf_file=source.path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=precision)
    tensors = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=model)["tensors"]
    missing, _ = model.load_state_dict(tensors, strict=False)
    if unset := [name for name in missing if not (config.tie_word_embeddings and name == "lm_head.weight")]:
        raise ConfigError(f"--compare transformers: {source.path.name} sets no {', '.join(unset)} in transformers")
    model.tie_weights()
    return _without_end(model, device)


def _without_end(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Ready to run, with no token that ends a sequence early."""
    model.generation_config.eos_token_id = None
    return model.eval().to(device)


def compare_case(
    llm: LLM, model: PreTrainedModel, case: Case | Dataset, mode: Mode, *, seed: int = 0, repeat: int = 3
) -> Iterator[OfflineResult | CompareResult]:
    """One case by raylm and by transformers, in turns, `repeat` times; medians. First raylm's own line."""
    workload = Workload.of(case, llm, seed)
    ours = RaylmRunner(llm)
    if mode == "latency":
        others: list[Runner] = [GenerateRunner(model, "generate")]
    else:
        others = [GenerateRunner(model, "static"), GenerateBatchRunner(model, workload.draw(1))]
    try:
        seconds, failures = in_turns([ours, *others], workload, mode, repeat=repeat)
    finally:
        model.destroy_cached_continuous_batching_manager()
    if ours.name in failures:
        raise RaylmError(failures[ours.name])
    result = result_of(workload, mode, seconds[ours.name], model=llm.name)
    yield result
    output = result.output_tokens_per_s * result.seconds
    for other in others:
        yield _comparison(result, other.name, output, seconds.get(other.name), failures.get(other.name))


def in_turns(
    runners: Sequence[Runner], workload: Workload, mode: Mode, *, repeat: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Median seconds a runner, and why a runner could not run. Turns, so that a slow minute hits all alike."""
    failures: dict[str, str] = {}
    seconds: dict[str, list[float]] = {runner.name: [] for runner in runners}

    def attempt(runner: Runner, work: Callable[[], object]) -> None:
        if runner.name in failures:
            return
        try:
            work()
        except Exception as error:  # What another program raises is not known; it is reported, not hidden.
            failures[runner.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

    for runner in runners:
        attempt(runner, partial(warm_up, runner, workload))
    for repetition in range(1, repeat + 1):
        requests = workload.draw(repetition)
        for runner in runners:
            attempt(runner, partial(_time, runner, requests, mode, seconds[runner.name]))
    return {name: median(seen) for name, seen in seconds.items() if seen and name not in failures}, failures


def _time(runner: Runner, requests: Sequence[TokenRequest], mode: Mode, seconds: list[float]) -> None:
    seconds.append(measure(runner, requests, mode))


def _comparison(
    ours: OfflineResult, against: str, output_tokens: float, seconds: float | None, failure: str | None
) -> CompareResult:
    theirs = None if seconds is None else output_tokens / seconds
    return CompareResult(
        bench="compare",
        case=ours.case,
        against=against,
        raylm_tokens_per_s=ours.output_tokens_per_s,
        other_tokens_per_s=theirs,
        ratio=None if theirs is None else ours.output_tokens_per_s / theirs,
        unavailable=failure,
    )


def _config(output_len: int, *, eos_token_id: int | None = None) -> GenerationConfig:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=output_len, do_sample=False, eos_token_id=eos_token_id, pad_token_id=_PAD)


def _left_padded(prompts: Sequence[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, each [num_prompts, longest prompt]."""
    import torch

    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[_PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids.to(device), mask.to(device)
