"""Which requests an engine takes: whatever can never be served is refused before it is queued."""

from __future__ import annotations

from collections.abc import Sequence

from raylm.config.sampling import GenerationConfig
from raylm.core.request import Begun
from raylm.core.sampling import ALL_TOKENS, SamplingParams
from raylm.errors import RequestRejected


def check_prompt(prompt_ids: list[int], params: SamplingParams, *, max_model_len: int, vocab_size: int) -> None:
    """Refuse a prompt that the model cannot take together with the tokens asked for. Raises RequestRejected with the
    numbers."""
    if not prompt_ids:
        raise RequestRejected("the prompt is empty; it must have at least 1 token", param="prompt")
    if len(prompt_ids) >= max_model_len:
        raise RequestRejected(
            f"the prompt has {len(prompt_ids)} tokens, but this model takes {max_model_len} in all "
            "and at least one must be left for the output",
            param="prompt",
            code="context_length_exceeded",
        )
    if params.max_tokens is not None and len(prompt_ids) + params.max_tokens > max_model_len:
        raise RequestRejected(
            f"the prompt has {len(prompt_ids)} tokens and max_tokens is {params.max_tokens}, "
            f"together more than the {max_model_len} that this model takes",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if set(map(type, prompt_ids)) != {int}:
        index, wrong = next((index, token) for index, token in enumerate(prompt_ids) if type(token) is not int)
        raise RequestRejected(f"the prompt must hold integers, got {wrong!r:.300} at {index}", param="prompt")
    worst = max(prompt_ids) if min(prompt_ids) >= 0 else min(prompt_ids)
    if not 0 <= worst < vocab_size:
        raise RequestRejected(
            f"the prompt holds the token id {worst}; this model has 0 to {vocab_size - 1}", param="prompt"
        )


def check_begun(
    ids: Sequence[str], begun: Sequence[Begun], params: SamplingParams, *, room: int, vocab_size: int
) -> None:
    """Refuse sequences that another engine cannot have begun: no more than `room` tokens may follow the prompt. Raises
    RequestRejected."""
    if len(begun) != len(ids) or params.beam_width:
        raise RequestRejected(f"{len(begun)} sequences were begun, but {len(ids)} are to go on", param="begun")
    for number, token_ids in begun:
        if not 0 <= number < params.n or len(token_ids) >= room:
            raise RequestRejected(
                f"sequence {number} of {params.n} has {len(token_ids)} tokens; it may have {room - 1}", param="begun"
            )
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise RequestRejected(f"sequence {number} has tokens outside of 0 to {vocab_size - 1}", param="begun")


def check_params(
    params: SamplingParams, config: GenerationConfig, *, vocab_size: int, eos: frozenset[int] = frozenset()
) -> None:
    """Refuse sampling that this model and its configuration do not allow, or that leaves no token to sample. `eos` are
    the model's end-of-sequence tokens. Raises RequestRejected with the numbers."""
    if 2 * params.beam_width > vocab_size:
        raise RequestRejected(
            f"beam_width is {params.beam_width}, but half of this model's {vocab_size} tokens is the most it can be",
            param="beam_width",
        )
    for field, tokens in params.named_tokens():
        if tokens and max(tokens) >= vocab_size:
            raise RequestRejected(
                f"{field} holds the token id {max(tokens)}; this model has 0 to {vocab_size - 1}", param=field
            )
    for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and (vocab_size if count == ALL_TOKENS else count) > config.max_logprobs:
            raise RequestRejected(
                f"{field} is {count}, but at most {config.max_logprobs} tokens are reported at a position "
                "(generation.max_logprobs)",
                param=field,
            )
    if len(params.logprob_token_ids) > config.max_logprobs:
        raise RequestRejected(
            f"logprob_token_ids has {len(params.logprob_token_ids)} tokens, but at most {config.max_logprobs} are "
            "reported at a position (generation.max_logprobs)",
            param="logprob_token_ids",
        )
    for name in params.logits_processors:
        if name not in config.logits_processors:
            known = ", ".join(map(repr, config.logits_processors)) or "none"
            raise RequestRejected(
                f"logits_processors names {name!r:.100}; this model has {known} (generation.logits_processors)",
                param="logits_processors",
            )
    if params.thinking_token_budget >= 0 and params.thinking is None:
        raise RequestRejected(
            "thinking_token_budget needs a model whose thinking has marks (thinking); none are known of this one",
            param="thinking_token_budget",
        )
    if params.structure is not None and not params.structure.is_ready:
        raise RequestRejected(
            f"structure of kind {params.structure.kind} must be turned into a grammar first (GrammarCompiler)",
            param="structure",
        )
    if params.structure is not None and not any(token < vocab_size for token in _ends(params, eos)):
        raise RequestRejected(
            "structure needs a token that ends the text: with ignore_eos, or a model without an end of its own, one of "
            f"stop_token_ids must be below {vocab_size}, the vocabulary's size",
            param="structure",
        )
    _check_some_token_is_left(params, eos)


def _ends(params: SamplingParams, eos: frozenset[int]) -> set[int]:
    """The tokens that end a completion."""
    return set(params.stop_token_ids) | (set() if params.ignore_eos else eos)


def _check_some_token_is_left(params: SamplingParams, eos: frozenset[int]) -> None:
    allowed = set(params.allowed_token_ids)
    if not allowed:
        return
    left = allowed - {word[0] for word in params.bad_token_ids if len(word) == 1}
    if not left:
        raise RequestRejected(
            f"allowed_token_ids leaves no token: all {len(allowed)} of them are bad words", param="allowed_token_ids"
        )
    if params.min_tokens and left <= _ends(params, eos):
        others = " that are no bad words" if len(left) < len(allowed) else ""
        raise RequestRejected(
            f"allowed_token_ids leaves no token for the first {params.min_tokens} (min_tokens): all {len(left)} of "
            f"them{others} end the completion",
            param="allowed_token_ids",
        )
