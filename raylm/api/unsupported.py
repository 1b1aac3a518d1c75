"""Fields that clients of OpenAI, vLLM and SGLang know and that raylm has not built: refused by name, never ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping

from raylm.errors import RequestRejected
from raylm.generation.quote import quote

Neutral = tuple[object, ...]
"""The values of a field, besides null, that ask for nothing."""
Fields = Mapping[str, Neutral]

OPENAI: Fields = {
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
VLLM: Fields = {
    "ec_transfer_params": ({},),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "max_repetition_pattern_size": (0,),
    "media_io_kwargs": ({},),
    "min_repetition_pattern_size": (0,),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "repetition_detection": (),
    "repetition_min_count": (0,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
SGLANG: Fields = {
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_labels": ({},),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "disagg_prefill_dp_rank": (),
    "extra_key": (),
    "images_config": ({},),
    "input_ids": (),
    "lora_path": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "ngram_corpus_id": (),
    "no_stop_trim": (False,),
    "reasoning": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "routed_dp_rank": (),
    "routed_experts_start_len": (0,),
    "session_params": ({},),
    "stop_regex": ([],),
    "task": (),
    "use_audio_in_video": (False,),
}
UNSUPPORTED: Fields = {**OPENAI, **VLLM, **SGLANG}
"""On every route."""
CHAT_ONLY: Fields = {"echo": (False,)}
OF_CHATS: Fields = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (-1,),
    "include_reasoning": (True,),
    "parallel_tool_calls": (True, False),
    "separate_reasoning": (True, False),
}
"""What a prompt that is no chat has no use for."""
COMPLETIONS_ONLY: Fields = {"max_completion_tokens": (), "top_logprobs": (0,), **OF_CHATS}
STREAM_OPTIONS: Fields = {"include_obfuscation": (False,)}
MESSAGE: Fields = {"audio": (), "tools": ([],)}

HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(("metadata", "safety_identifier"), "it labels the request for OpenAI's records"),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "session_id"),
        "prefixes are cached and found without it",
    ),
    "service_tier": "there is one tier",
    "stream_reasoning": "a stream has the reasoning as it comes",
    "return_mm_kwargs": "prompts have no images or sounds",
}
"""Fields that are known and never change an answer, and why not."""


def refuse_unsupported(data: Mapping[str, object], *, chat: bool) -> None:
    """Raises RequestRejected for the first field, in the order of the tables above, that asks for something."""
    own = CHAT_ONLY if chat else COMPLETIONS_ONLY
    for table in (UNSUPPORTED, own):
        for name, neutral in table.items():
            if name in data:
                _check(name, data[name], neutral)
    refuse_fields(data.get("stream_options"), STREAM_OPTIONS, "stream_options.")
    messages = data.get("messages")
    for index, message in enumerate(messages if chat and isinstance(messages, list) else ()):
        refuse_fields(message, MESSAGE, f"messages[{index}].")


def refuse_fields(data: object, table: Fields, place: str = "") -> None:
    """Raises RequestRejected for the first field of `table` that asks for something in `data`, if that is an object;
    `place` stands before the field's name."""
    if isinstance(data, dict):
        for name, neutral in table.items():
            if name in data:
                _check(place + name, data[name], neutral)


def _check(name: str, value: object, neutral: Neutral) -> None:
    # In Python False equals 0.
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        return
    allowed = " or ".join([json.dumps(one) for one in neutral] + ["null"])
    raise RequestRejected(
        f"{name} is not supported: it must be left out or be {allowed}, got {quote(value)}",
        param=name,
        code="unsupported_parameter",
    )
