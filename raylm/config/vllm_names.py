"""vLLM's names of options: what they are here, which ask for what raylm does anyway, and what raylm has not.

Names are as in Python: a command's option --max-model-len is max_model_len. What is not here has the same name in
both, or is unknown. docs/from-vllm.md is made of these tables. They have every option of vLLM 0.26.0 and 0.33.0,
and older ones.
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


def _measured(value: object) -> object:
    return "measured" if value else "checkpoint"


VALUES: dict[str, dict[object, object]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "cache_dtype": {"fp8_e4m3": "fp8"},
    "implementation": {"vllm": "raylm"},
    "generation_defaults": {"auto": "model", "vllm": "neutral"},
    "quantization": {
        "gptq_marlin": "gptq",
        "auto_gptq": "gptq",
        "awq_marlin": "awq",
        "auto_awq": "awq",
        "inc": "auto-round",
        "modelopt_fp4": "modelopt",
        "modelopt_mxfp8": "modelopt",
        "modelopt_mixed": "modelopt",
        "gpt_oss_mxfp4": "mxfp4",
    },
}
"""Key -> vLLM's words for its values, and ours."""
_SHORT = (
    *("tp", "pp", "dp", "ep", "dcp", "pcp", "q", "sc", "cc", "ac", "dc", "n", "r", "asc", "O"),
    *("dpn", "dpr", "dpl", "dpa", "dpp", "dpb", "dph", "dpe", "dpm"),
)


def flag(name: str) -> str:
    """An option's name on the command line; vLLM's short ones have one dash."""
    return f"-{name}" if name in _SHORT else "--" + name.replace("_", "-")


NAMES: dict[str, Renamed] = {
    "tensor_parallel_size": Renamed("tensor"),
    "tp": Renamed("tensor"),
    "pipeline_parallel_size": Renamed("pipeline"),
    "pp": Renamed("pipeline"),
    "q": Renamed("quantization"),
    "device_memory_utilization": Renamed("gpu_memory_utilization"),
    "max_num_queued_tokens": Renamed("max_queued_tokens", note="tokens of an engine's waiting prompts alone"),
    "model_impl": Renamed("implementation"),
    "enforce_eager": Renamed("cuda_graphs", _not, "enforce_eager is cuda_graphs: false", is_flag=True),
    "disable_custom_all_reduce": Renamed("custom_all_reduce", _not, is_flag=True),
    "disable_cascade_attn": Renamed("cascade_attention", _not, is_flag=True),
    "enable_prefix_caching": Renamed("prefix_caching", is_flag=True),
    "prefix_caching_hash_algo": Renamed("block_hash"),
    "num_gpu_blocks_override": Renamed("num_blocks"),
    "kv_cache_dtype": Renamed("cache_dtype"),
    "calculate_kv_scales": Renamed(
        "cache_scales", _measured, "calculate_kv_scales is cache_scales: measured", is_flag=True
    ),
    "swap_space": Renamed("swap_gib"),
    "scheduling_policy": Renamed("policy"),
    "served_model_name": Renamed("name", note="further names are `--aliases` (`model.aliases`)", rest="aliases"),
    "attention_backend": Renamed("attention"),
    "tool_call_parser": Renamed("chat_tools"),
    "reasoning_parser": Renamed("chat_reasoning"),
    "logprobs_mode": Renamed("generation_logprobs"),
    "max_logprobs": Renamed("generation_max_logprobs"),
    "default_chat_template_kwargs": Renamed("chat_template_kwargs"),
    "trust_request_chat_template": Renamed("chat_allow_request_templates", is_flag=True),
    "generation_config": Renamed("generation_defaults", note="`auto` is `model`, `vllm` is `neutral`"),
    "override_generation_config": Renamed(
        "sampling", note="in `raylm bench`, whose own `--sampling` is for requests, under vLLM's name alone"
    ),
    "spec_method": Renamed("speculation_method"),
    "spec_model": Renamed("speculation_model"),
    "spec_tokens": Renamed("speculation_num_drafts"),
    "speculative_model": Renamed("speculation_model", note="give `--speculation-method draft_model` too"),
    "num_speculative_tokens": Renamed("speculation_num_drafts"),
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
    "max_log_len": "prompts are not logged",
    "enable_request_id_headers": "every answer has x-request-id",
}
"""vLLM's name -> why it changes nothing."""
TAKES_VALUE = ("distributed_executor_backend", "max_log_len")
"""Those of them that have a value behind them; the others are flags."""

_ENGINE = "raylm's engine has no such mode"
REFUSED: dict[str, str] = {
    "model": "the model is the first word: raylm serve MODEL",
    "config": "a configuration (.yaml) is the first word, in the model's place: raylm serve CONFIG",
    "api_server_count": "give OpenAIIngress replicas: num_replicas in the deployment's configuration",
    "asc": "give OpenAIIngress replicas: num_replicas in the deployment's configuration",
    "headless": "give the model replicas: num_replicas or autoscaling_config of its application",
    "grpc": "requests come by HTTP",
    "grpc_port": "requests come by HTTP",
    "max_num_queued_reqs": "max_queued_requests bounds the requests that wait; those that run are max_num_seqs",
    "max_num_active_seqs": "max_num_seqs bounds the requests that run",
    "sse_keep_alive_interval": "it is the ingress's keep_alive_s (docs/deploy.md)",
    "log_level": "it stands before the command: raylm --log-level INFO serve MODEL",
    "tokenizer": "the tokenizer is the model's own; put another one's files into the model's folder",
    "tokenizer_mode": "there is one tokenizer, Hugging Face's fast one",
    "tokenizer_revision": "the tokenizer is of the model's own revision (revision)",
    "code_revision": "no code of a checkpoint is run",
    "skip_tokenizer_init": "requests are text as well as tokens; send token ids where you have them",
    "hf_overrides": "change config.json in a copy of the model's folder",
    "hf_config_path": "config.json is that of the model's folder",
    "config_format": "it is found out from the files",
    "rope_scaling": "change rope_scaling in a copy of config.json",
    "rope_theta": "change rope_theta in a copy of config.json",
    "enable_lora": "adapters are not served yet; merge one into its model's weights",
    "lora_modules": "adapters are not served yet; merge one into its model's weights",
    "max_loras": "adapters are not served yet",
    "max_lora_rank": "adapters are not served yet",
    "guided_decoding_backend": "grammars are compiled by xgrammar's library alone",
    "structured_outputs_config": "grammars are compiled by xgrammar's library alone",
    "data_parallel_size": "give the model replicas: num_replicas or autoscaling_config of its application",
    "ep": "experts are split like other layers, over tensor workers",
    "dp": "give the model replicas: num_replicas or autoscaling_config of its application",
    "enable_expert_parallel": "experts are split like other layers, over tensor workers",
    "decode_context_parallel_size": _ENGINE,
    "cpu_offload_gb": "weights stay on the GPU; split the model with tensor or pipeline",
    "compilation_config": "models are not compiled: steps are CUDA graphs (cuda_graphs) of written kernels",
    "O": "models are not compiled: steps are CUDA graphs (cuda_graphs) of written kernels",
    "cc": "models are not compiled: steps are CUDA graphs (cuda_graphs) of written kernels",
    "optimization_level": "models are not compiled: steps are CUDA graphs (cuda_graphs) of written kernels",
    "max_seq_len_to_capture": "graphs are captured for what comes, of any length",
    "cuda_graph_sizes": "graphs are captured for what comes",
    "max_parallel_loading_workers": "workers load at the same time",
    "kv_transfer_config": "prefill and decode are not apart",
    "limit_mm_per_prompt": "models see text alone",
    "mm_processor_kwargs": "models see text alone",
    "task": "models generate text",
    "runner": "models generate text",
    "convert": "models generate text",
    "enable_sleep_mode": "engines do not sleep; a model without requests may have no replica (min_replicas: 0)",
    "max_num_partial_prefills": "as many prompts are in a step as its budget and prefill_chunk have room for",
    "max_long_partial_prefills": "max_prompt_share bounds what one prompt takes of a step's tokens for prompts",
    "long_prefill_token_threshold": "max_prompt_share bounds what one prompt takes of a step's tokens for prompts",
    "disable_sliding_window": "windows are part of the model",
    "additional_config": _ENGINE,
    "worker_cls": _ENGINE,
    "worker_extension_cls": _ENGINE,
    "logits_processors": "name them as generation_logits_processors; they are entry points (docs/deploy.md)",
    "allowed_local_media_path": "models see text alone",
    "ray_workers_use_nsight": "profiles are torch's: profile_folder and POST /start_profile",
}
"""vLLM's name -> what raylm has in its place, or that it has nothing."""

_GROUPS: dict[str, str] = {
    "models see text alone": """allowed_media_domains default_mm_loras disable_chunked_mm_input ec_transfer_config
        enable_mm_embeds enable_mm_processor_stats interleave_mm_strings io_processor_plugin language_model_only
        media_io_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode
        mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc
        skip_mm_profiling video_pruning_rate enable_tower_connector_lora disable_mm_preprocessor_cache ec_manager_config
        enable_multimodal_encoder_data_parallel enable_shm_tensor_arena mm_device_do_normalize mm_hasher_algorithm
        mm_processor_device trust_request_mm_kwargs video_pruning_method""",
    "models generate text": """dc diffusion_config enable_flash_late_interaction
        override_pooler_config pooler_config""",
    "adapters are not served yet": """enable_mixed_moe_lora_format enable_moe_shared_loras fully_sharded_loras
        enable_lora_bias lora_dtype lora_extra_vocab_size lora_target_modules max_cpu_loras max_lora_cls_labels
        specialize_active_lora""",
    "give the model replicas: num_replicas or autoscaling_config of its application": """data_parallel_address
        data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
        data_parallel_rank data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank
        data_parallel_supervisor_port disable_nccl_for_dp_synchronization dp_supervisor_probe_failure_threshold
        dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_sync_interval dpa dpb dpe dph dpl dpm dpn dpp
        dpr enable_fault_tolerance fault_tolerance_config""",
    "experts are split like other layers, over tensor workers": """all2all_backend enable_elastic_ep
        elastic_ep_max_dp_size enable_ep_weight_filter enable_eplb eplb_config eplb_log_balancedness eplb_step_interval
        eplb_window_size expert_placement_strategy num_redundant_experts""",
    "Ray places the workers, on one node or several": """cpu_distributed_timeout_seconds device_ids
        distributed_timeout_seconds master_addr master_port n nnodes node_rank r numa_bind numa_bind_cpus
        numa_bind_nodes""",
    "the kernel is chosen by measured times": """ac attention_config enable_bf16x3_router_gemm
        enable_flashinfer_autotune gdn_prefill_backend kda_decode_backend kda_prefill_backend kernel_config
        linear_backend moe_backend monokernel override_attention_dtype sparse_indexer_topk_backend use_fp64_gumbel""",
    "no model with a recurrent state is served yet": """enable_mamba_cache_stochastic_rounding
        enable_mamba_shared_prefix_checkpoint mamba_backend mamba_ssu_algorithm prefix_cache_retention_interval
        replayssm_buffer_len use_replayssm
        mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config
        mamba_ssm_cache_dtype""",
    "models are not compiled: steps are CUDA graphs (cuda_graphs) of written kernels": """cudagraph_capture_sizes
        cudagraph_metrics ir_op_priority jit_monitor_mode jit_monitor_verbose max_cudagraph_capture_size""",
    "weights stay on the GPU; split the model with tensor or pipeline": """cpu_offload_params offload_backend
        offload_group_size offload_num_in_group offload_params offload_prefetch_step""",
    "preempted requests go to the host's memory: swap_gib": "kv_offloading_backend kv_offloading_size",
    "the KV cache is sized by gpu_memory_utilization or num_blocks": "kv_cache_memory_bytes watermark",
    "the KV cache has one type in all layers (cache_dtype)": "kv_cache_dtype_skip_layers",
    "raylm quantises to fp8 alone (quantization); how a checkpoint is quantised is read from its own files": """
        allow_deprecated_quantization quantization_config""",
    "files are found by their names and read by several threads": """ignore_patterns model_loader_extra_config
        model_weights pt_load_map_location safetensors_prefetch_block_size safetensors_prefetch_num_threads""",
    "the hub's cache is HF_HOME's, its token HF_TOKEN's or the stored one": "download_dir hf_token",
    "plug-ins are entry points (docs/plugins.md)": """middleware model_class_overrides reasoning_parser_plugin
        scheduler_cls tool_parser_plugin""",
    "profiles are torch's: profile_folder and POST /start_profile": "enable_layerwise_nvtx_tracing profiler_config",
    "engines do not sleep; a model without requests may have no replica (min_replicas: 0)": """
        enable_nccl_comm_suspend sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names""",
    "figures are at /metrics; raylm bench trace says what a step takes": """custom_histogram_buckets
        enable_mfu_metrics per_request_spec_decode_metrics
        enable_per_request_metrics enable_server_load_tracking kv_cache_metrics kv_cache_metrics_sample
        show_hidden_metrics_for_version""",
    "traces are the key tracing of an application (docs/observability.md)": """collect_detailed_traces
        otlp_traces_endpoint""",
    "log lines are of one form: log_format": """aggregate_engine_logging disable_access_log_for_endpoints
        enable_log_deltas enable_log_outputs enable_log_requests enable_logging_iteration_details log_config_file
        log_error_stack logging_config uvicorn_log_level""",
    "pages may call from the origins in the ingress's cors_origins": """allow_credentials allowed_headers
        allowed_methods allowed_origins""",
    "TLS is ssl_certfile and ssl_keyfile; what else it needs belongs to a proxy before the server": """
        enable_ssl_refresh h11_max_header_count h11_max_incomplete_event_size ssl_ca_certs ssl_cert_reqs ssl_ciphers""",
    "it is found out from the chat template and the request": """chat_template_content_format
        cohere_format cohere_is_reasoning_model exclude_tools_when_tool_choice_none reasoning_effort_map
        response_role""",
    "a request asks for it": """anthropic_disabled_thinking_effort enable_force_include_usage
        return_tokens_as_token_ids tool_strict_level""",
    "grammars are compiled by xgrammar's library alone": """guided_decoding_disable_additional_properties
        guided_decoding_disable_any_whitespace guided_decoding_disable_fallback""",
    "max_prompt_share bounds what one prompt takes of a step's tokens for prompts": """
        long_prefill_token_threshold_adaptive""",
    "what is preempted goes to the host's memory (swap_gib) where that is given": "preemption_mode",
    "the next step is planned while one runs (plans_in_flight)": """disable_async_output_proc
        disable_frontend_multiprocessing num_lookahead_slots""",
    "a step's room for prompts is max_num_batched_tokens and prefill_chunk": "scheduler_delay_factor",
    "name them as generation_logits_processors; they are entry points (docs/deploy.md)": "logits_processor_pattern",
    _ENGINE: """aux_output_config dcp dcp_q_replicate enable_batch_sharded_sampling enable_hc_sp enable_scale_out
        enable_trace_replay engram_config pcp return_sampling_mask swa_bounded_replay watchdog_config watermark_config
        cp_kv_cache_interleave_size dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
        dcp_kv_cache_interleave_size disable_fastapi_docs disable_hybrid_kv_cache_manager
        enable_cumem_allocator enable_dbo enable_offline_docs enable_prompt_embeds
        enable_return_routed_experts enable_tokenizer_info_endpoint fail_on_environ_validation fingerprint_mode
        fingerprint_value kv_sharing_fast_prefill max_num_scheduled_tokens performance_mode
        prefill_context_parallel_size prefill_schedule_interval prefix_match_unit reasoning_config renderer_num_workers
        scheduler_reserve_full_isl shutdown_timeout stream_interval tokens_only tool_server ubatch_size
        weight_transfer_config""",
}
"""The same for many of them: the reason -> their names."""
REFUSED |= {name: reason for reason, names in _GROUPS.items() for name in names.split()}
