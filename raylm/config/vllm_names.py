"""vLLM's names of options: what they are here, which ask for what raylm does anyway, and what raylm has not.

Names are as in Python: a command's option --max-model-len is max_model_len. What is not here has the same name in
both, or is unknown. docs/from-vllm.md is made of these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Renamed(NamedTuple):
    """Another name of a key (`EngineKey.name`), and what becomes of the value."""

    key: str
    translate: Callable[[object], object] = lambda value: value
    note: str = ""
    is_flag: bool = False
    """It stands without a value, or with no- before it."""
    rest: str | None = None
    """The key of a list's values after the first; None where the option has one value."""


def _not(value: object) -> object:
    return not value


VALUES: dict[str, dict[object, object]] = {
    "dtype": {"half": "float16", "float": "float32"},
}
"""Key -> vLLM's words for its values, and ours."""
NAMES: dict[str, Renamed] = {
    "tensor_parallel_size": Renamed("tensor"),
    "tp": Renamed("tensor"),
    "pipeline_parallel_size": Renamed("pipeline"),
    "pp": Renamed("pipeline"),
    "enforce_eager": Renamed("cuda_graphs", _not, "enforce_eager is cuda_graphs: false", is_flag=True),
    "disable_custom_all_reduce": Renamed("custom_all_reduce", _not, is_flag=True),
    "enable_prefix_caching": Renamed("prefix_caching", is_flag=True),
    "prefix_caching_hash_algo": Renamed("block_hash"),
    "num_gpu_blocks_override": Renamed("num_blocks"),
    "swap_space": Renamed("swap_gib"),
    "scheduling_policy": Renamed("policy"),
    "served_model_name": Renamed("name", note="further names are `--aliases` (`model.aliases`)", rest="aliases"),
    "attention_backend": Renamed("attention"),
    "tool_call_parser": Renamed("chat_tools"),
    "reasoning_parser": Renamed("chat_reasoning"),
    "logprobs_mode": Renamed("generation_logprobs"),
    "safetensors_load_strategy": Renamed("load_format", lambda value: "auto", "files are read as fits them"),
}
"""vLLM's name -> the key here."""

ANYWAY: dict[str, str] = {
    "enable_chunked_prefill": "prompts are computed in chunks wherever that helps",
    "async_scheduling": "the next step is planned while one runs",
    "enable_auto_tool_choice": "calls of tools are read wherever the model's format is known",
    "trust_remote_code": "no code of a checkpoint is run, whatever this says",
    "disable_log_requests": "requests are not logged",
    "no_enable_log_requests": "requests are not logged",
    "disable_log_stats": "figures are at /metrics and not logged",
    "distributed_executor_backend": "Ray places the workers",
    "use_tqdm_on_load": "progress is shown on a terminal alone",
    "disable_uvicorn_access_log": "requests are not logged",
    "enable_prompt_tokens_details": "usage has them",
    "calculate_kv_scales": "the cache is not quantised",
    "max_log_len": "prompts are not logged",
}
"""vLLM's name -> why it changes nothing."""
TAKES_VALUE = ("distributed_executor_backend", "max_log_len")
"""Those of them that have a value behind them; the others are flags."""

_ENGINE = "raylm's engine has no such mode"
REFUSED: dict[str, str] = {
    "tokenizer": "the tokenizer is the model's own; put another one's files into the model's folder",
    "tokenizer_mode": "there is one tokenizer, Hugging Face's fast one",
    "tokenizer_revision": "the tokenizer is of the model's own revision (revision)",
    "code_revision": "no code of a checkpoint is run",
    "skip_tokenizer_init": "requests are text as well as tokens; send token ids where you have them",
    "quantization": "weights are computed in 16 or 32 bits; GGUF files of 4 to 8 bits are read (load_format gguf)",
    "kv_cache_dtype": "the KV cache has the model's type",
    "hf_overrides": "change config.json in a copy of the model's folder",
    "hf_config_path": "config.json is that of the model's folder",
    "config_format": "it is found out from the files",
    "rope_scaling": "change rope_scaling in a copy of config.json",
    "rope_theta": "change rope_theta in a copy of config.json",
    "override_generation_config": "give defaults of sampling as model.sampling in a configuration file",
    "generation_config": "generation_defaults says whether the model's own advice is followed (model, neutral)",
    "enable_lora": "adapters are not served yet; merge one into its model's weights",
    "lora_modules": "adapters are not served yet; merge one into its model's weights",
    "max_loras": "adapters are not served yet",
    "max_lora_rank": "adapters are not served yet",
    "speculative_config": "say it as speculation_method, speculation_model and speculation_num_drafts",
    "speculative_model": "say it as speculation_method and speculation_model",
    "num_speculative_tokens": "say it as speculation_num_drafts",
    "guided_decoding_backend": "grammars are compiled by xgrammar's library alone",
    "structured_outputs_config": "grammars are compiled by xgrammar's library alone",
    "data_parallel_size": "give the model replicas: num_replicas or autoscaling_config of its application",
    "dp": "give the model replicas: num_replicas or autoscaling_config of its application",
    "enable_expert_parallel": "experts are split like other layers, over tensor workers",
    "decode_context_parallel_size": _ENGINE,
    "cpu_offload_gb": "weights stay on the GPU; split the model with tensor or pipeline",
    "compilation_config": "models are not compiled: decode steps are CUDA graphs (cuda_graphs) of written kernels",
    "optimization_level": "models are not compiled: decode steps are CUDA graphs (cuda_graphs) of written kernels",
    "max_seq_len_to_capture": "graphs are captured for what comes, of any length",
    "cuda_graph_sizes": "graphs are captured for what comes",
    "max_parallel_loading_workers": "workers load at the same time",
    "kv_transfer_config": "prefill and decode are not apart",
    "kv_events_config": "say it as kv_events_endpoint and its neighbours",
    "limit_mm_per_prompt": "models see text alone",
    "mm_processor_kwargs": "models see text alone",
    "task": "models generate text",
    "runner": "models generate text",
    "convert": "models generate text",
    "enable_sleep_mode": "engines do not sleep; a model without requests may have no replica (min_replicas: 0)",
    "max_num_partial_prefills": "as many prompts are in a step as its budget has room for",
    "max_long_partial_prefills": "max_prompt_share bounds what one prompt takes of a step",
    "long_prefill_token_threshold": "max_prompt_share bounds what one prompt takes of a step",
    "disable_sliding_window": "windows are part of the model",
    "disable_cascade_attention": "attention reads shared prefixes as it reads others",
    "additional_config": _ENGINE,
    "worker_cls": _ENGINE,
    "worker_extension_cls": _ENGINE,
    "logits_processors": "name them as generation_logits_processors; they are entry points (docs/deploy.md)",
    "allowed_local_media_path": "models see text alone",
    "ray_workers_use_nsight": "profiles are torch's: profile_folder and POST /start_profile",
}
"""vLLM's name -> what raylm has in its place, or that it has nothing."""
