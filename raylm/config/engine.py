"""EngineConfig: everything one engine needs to know, as small sections that each component gets only its own of."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from raylm.config.base import FrozenConfig
from raylm.config.chat import ChatConfig
from raylm.config.hub_name import REVISION, at_revision, served_name
from raylm.config.kv_events import KVEventsConfig
from raylm.config.load_format import LoadFormat, known_format
from raylm.config.sampling import GenerationConfig, SamplingConfig
from raylm.config.speculation import ON_HOST, SpeculationConfig
from raylm.log import LogFormat
from raylm.plugins import plugin_names

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Implementation = Literal["auto", "raylm", "transformers"]
Weights = Literal["stored", "decoded"]
BlockHash = Literal["xxhash", "sha256"]
CacheDType = Literal["auto", "fp8"]
CacheScaling = Literal["checkpoint", "measured"]
POLICIES = ("fcfs", "priority", "fair")
NumSeqs = Annotated[int, Field(ge=1, le=4096)]
NumBatchedTokens = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Quantization = Literal[
    "fp8",
    "fbgemm_fp8",
    "compressed-tensors",
    "gptq",
    "awq",
    "auto-round",
    "modelopt",
    "quark",
    "bitsandbytes",
    "torchao",
    "mxfp4",
]
AttentionName = Literal["auto", "raylm", "flash_attn", "torch"]


class ModelConfig(FrozenConfig):
    """Which model, and how it is loaded."""

    path: str
    """A folder with config.json and safetensors, a .gguf file, a model of the Hugging Face hub (owner/name, or
    owner/name:Q4_K_M for one of its .gguf files), the URL of a folder or .gguf file in an object store (s3://, gs://),
    or the name of the demo model: smollm2-135m."""
    revision: str | None = Field(default=None, min_length=1, max_length=256, pattern=REVISION)
    """Of a model on the hub: a branch, a tag or a commit; by default the main branch. Replicas load the commit that it
    was when the model was deployed."""
    name: str | None = None
    """The name that clients use; by default the hub's (owner/name), or the last part of the path."""
    aliases: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default=[], max_length=64)
    """Other names under which clients find the model. Answers and metrics have `name`."""
    dtype: DType = "auto"
    """auto: float32 on a CPU; on a GPU the checkpoint's own, or bfloat16 where that is float32."""
    load_format: Annotated[LoadFormat, BeforeValidator(known_format)] = "auto"
    """auto takes the first that is there: safetensors (model*.safetensors), mistral (consolidated*.safetensors, as
    Mistral names tensors), pt (pytorch_model*.bin, without running code of it), or gguf. dummy makes random weights of
    the right shapes from the model's configuration alone."""
    weights: Weights = "stored"
    """stored: matrices stay as the checkpoint stores them where there are kernels that compute with them. On Hopper
    GPUs those are FP8, with activations quantised to FP8 too where the checkpoint says so, integers, MXFP4, MXFP8, NF4
    and a GGUF file's quantised blocks; on CPUs with the extension a GGUF file's quantised blocks, matrices of integers
    that such blocks hold exactly, and matrices of 16 bits beside a `dtype` of float32. decoded: all matrices become
    numbers of `dtype` while loading."""
    implementation: Implementation = "auto"
    """Whose code the layers are: raylm's, or transformers' with raylm's attention, cache and linear layers, which is
    slower. auto takes raylm's where it has the model's family."""
    quantization: Quantization | None = None
    """How the checkpoint must be quantised, or the start fails. By default it may be quantised in any of these ways, or
    not at all. fp8: a checkpoint that is not quantised is quantised while it is loaded, all linear layers within its
    layers but routers: 8-bit floats with a scale a row, activations with a scale a token; experts with a scale for each
    128 columns, their activations with a scale a row in steps of more than 64 tokens. It takes about half the memory of
    bfloat16. Needs a Hopper GPU; CPUs compute it for tests, slowly, with experts in numbers of `dtype`."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Prompt and output tokens of one request at most; by default what the model was trained for."""
    chat_template: str | None = None
    """The chat template in place of the checkpoint's: a file on every node, the text itself, or the name of a bundled
    one (alpaca, chatml, llama-2, vicuna, zephyr)."""
    seed: int = 0
    """Seed of dummy weights."""
    sampling: SamplingConfig = SamplingConfig()
    """How requests are sampled that leave it open."""

    @model_validator(mode="after")
    def _has_each_name_once(self) -> ModelConfig:
        if twice := next((name for name in self.aliases if self.served_names.count(name) > 1), None):
            raise ValueError(f"aliases holds {twice!r}, which the model is named already; each name is given once")
        return self

    @property
    def served_name(self) -> str:
        return self.name or served_name(self.path)

    @property
    def served_names(self) -> list[str]:
        """The name, and the aliases."""
        return [self.served_name, *self.aliases]

    @property
    def reference(self) -> str:
        """What `raylm.model_files.source.locate` finds the model by: the path, with the revision in it. Raises
        ConfigError where a revision is given and the path has none."""
        return at_revision(self.path, self.revision)


class CacheConfig(FrozenConfig):
    """The paged KV cache."""

    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens a block."""
    dtype: CacheDType = "auto"
    """How keys and values are stored (the option is cache_dtype). auto: as numbers of `model.dtype`. fp8: as 8-bit
    floats (e4m3), in half the memory of 16 bits, with a scale for a layer's keys and one for its values."""
    scales: CacheScaling = "checkpoint"
    """Where the scales of an fp8 cache come from (the option is cache_scales). checkpoint: from the checkpoint; 1 in
    layers where it has none. measured: in these layers from the largest key and value of a fixed text of 1,024 tokens,
    which the model computes when it has been loaded; for models whose keys or values are larger than 448, or small."""
    num_blocks: int | None = Field(default=None, ge=2)
    """Blocks of the cache; by default what fits in the memory below."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that weights, activations and cache may take together."""
    cpu_memory_gib: float = Field(default=1.0, gt=0)
    """Memory of the cache on a CPU, in GiB."""
    swap_gib: float = Field(default=0.0, ge=0)
    """Pinned host memory that preempted requests may be copied to, in GiB, where that is cheaper than to compute them
    again; 0 always computes again."""
    prefix_caching: bool = True
    """Keep the blocks of ended requests, and share blocks of equal prefixes."""
    block_hash: BlockHash = "xxhash"
    """sha256 costs more time, and nobody can make two prefixes collide on purpose. (Tokens are compared either way.)"""
    events: bool = True
    """Let ingresses follow which blocks are stored and removed: they send requests to where their prefix is. Offline
    nobody follows, and nothing is kept."""

    @model_validator(mode="after")
    def _scales_are_of_codes(self) -> CacheConfig:
        if self.scales == "measured" and self.dtype != "fp8":
            raise ValueError(f"scales is measured, but dtype is {self.dtype}, which has none; allowed with it: fp8")
        return self


class SchedulerConfig(FrozenConfig):
    """What one step may hold and how many requests may wait."""

    max_num_seqs: NumSeqs | None = None
    """Requests that run at the same time; by default 64 on a CPU, 1,024 on a GPU, and at most as many as a step
    has tokens."""
    max_num_batched_tokens: NumBatchedTokens | None = None
    """The token budget of a step, for prefill and decode together; by default 2,048 on a CPU, 8,192 on a GPU,
    and at least one for each of max_num_seqs."""
    max_queued_requests: int = Field(default=1024, ge=1)
    """Requests that may wait; one more is refused with 503."""
    max_queued_tokens: int | None = Field(default=None, ge=1)
    """Prompt tokens of all waiting requests together; what would go past it is refused with 503."""
    max_queue_s: float | None = Field(default=None, gt=0)
    """Seconds in the queue that a newcomer may have to expect, by what was measured of late; one that would wait longer
    is refused with 503 and Retry-After. So an overload costs those who are served no more than this. By default the
    queue's length alone is bounded. Policies other than fcfs let newcomers go first, and it does nothing with them."""
    policy: str = "fcfs"
    """Who is admitted next: fcfs, first come first served; priority, the lowest `priority` of a request first; fair,
    the tenant that was served least; or the name of a plug-in (docs/plugins.md)."""
    ageing_s: float = Field(default=30.0, gt=0)
    """priority: a request that waits this long counts as one priority lower, so that none starves."""
    tenant_weights: dict[str, float] = {}
    """fair: a tenant of weight 2 gets twice what one of weight 1 gets; 1 where a tenant is not named."""
    target_itl_ms: float | None = Field(default=None, gt=0)
    """Give prefill only so many tokens a step that running requests get a token every so many milliseconds; by default
    prefill_chunk bounds them."""
    prefill_chunk: int | None = Field(default=None, ge=16)
    """Tokens of prompts in a step beside running requests. While more than four requests wait that a row is free for, a
    step gets a quarter of a chunk for each. By default 512 where clients follow their answers (servers, AsyncLLM),
    elsewhere what the budget leaves, or the whole step while all that wait find a row. target_itl_ms overrides it."""
    max_prompt_share: float = Field(default=1.0, gt=0, le=1)
    """Share of a step's tokens for prompts that one of them may take while others run or wait."""

    @field_validator("policy")
    @classmethod
    def _is_known(cls, policy: str) -> str:
        if policy not in POLICIES and policy not in plugin_names("raylm.schedulers"):
            known = ", ".join([*POLICIES, *plugin_names("raylm.schedulers")])
            raise ValueError(f"it must be one of {known}, or the name of a plug-in (raylm.schedulers)")
        return policy

    @model_validator(mode="after")
    def _budget_covers_decode(self) -> SchedulerConfig:
        budget, rows = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and rows is not None and budget < rows:
            raise ValueError(
                f"max_num_batched_tokens ({budget}) must be at least "
                f"max_num_seqs ({rows}), so that a step can decode every running request"
            )
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"tenant_weights.{tenant} must be over 0, got {weight:g}")
        return self


class RuntimeConfig(FrozenConfig):
    """Where and how the engine runs."""

    device: Device = "auto"
    attention: AttentionName = "auto"
    """raylm: the compiled extension's kernel; flash_attn: that of vllm_flash_attn or vllm, 16-bit types on a GPU only;
    torch: slow, on any device. auto takes the first of them that can run."""
    deterministic: bool = False
    """On a GPU, a request's logits are the same bits whatever runs beside it and however its prompt is cut into chunks:
    greedy and seeded requests give the same text, which other kernels do not promise. Slower. For 16-bit types and
    raylm's own attention; weights that are stored quantised must be decoded (model.weights). Not on CPUs."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of a worker; by default one a core, shared by the workers of the model."""
    cuda_graphs: bool = True
    """On a GPU, run steps of up to 1,024 tokens, and all in which every request decodes, as CUDA graphs."""
    cascade_attention: bool = True
    """On a GPU, decode reads the cached keys and values that many requests begin with alike once for all of them, where
    that spares much: heads of up to 128 elements, full attention, 16 bits. Not with deterministic."""
    ray_workers: bool = False
    """Offline: run the model in Ray actors even where one device is enough. Servers always do."""
    plans_in_flight: int | None = Field(default=None, ge=1)
    """Steps planned ahead: one a pipeline stage keeps all stages busy, one more overlaps scheduling with execution. By
    default that many with Ray workers or a GPU, else 1."""
    step_timeout_s: Seconds | None = None
    """A step without a result for this long counts as the engine's death; by default 10 s on a GPU, 60 s on a CPU.
    Requests wait this long for the error when a worker hangs, so it is short where the largest step takes a second or
    two; on a CPU a step of a long prompt may take half a minute."""
    profile_folder: str | None = None
    """Where workers put traces of their steps when POST /start_profile asks for them, each on its own node. Without a
    folder none can be asked for."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Loading a model may take this long; so may a worker wait for another one in a collective."""
    log_format: LogFormat = "text"
    """How the model's processes on Ray write their log lines, on standard error: replica, engine, workers, and the
    stages of a batch job. json: one object a line."""


class ParallelConfig(FrozenConfig):
    """How many workers share one model: tensor * pipeline of them, a device each, in a placement group."""

    tensor: int = Field(default=1, ge=1)
    """Workers that split every layer between them."""
    pipeline: int = Field(default=1, ge=1)
    """Stages that split the list of layers."""
    stage_layers: list[int] | None = None
    """Layers of each stage, first to last; by default as even as can be."""
    gpu_type: str | None = None
    """Only GPUs of this type, as Ray names it in the node label ray.io/accelerator-type: H200, A100 ..."""
    placement_timeout_s: float = Field(default=60.0, ge=0)
    """How long the cluster may take to find room for the workers; where nodes have yet to start, give it that time."""
    multicast: bool = False
    """Let NCCL use NVLink multicast (NVLS) where the host has it."""
    custom_all_reduce: bool = True
    """Sum small tensors, and those that a norm follows, and gather logits by raylm's own kernels where the GPUs of a
    tensor group can use each other's memory, and run steps of few rows in one kernel there. For it a rank holds up to
    twice the hidden states of the largest step."""
    check_ranks: bool = False
    """Compare what the ranks are given, every step; for debugging, it costs a collective a step."""

    @property
    def num_workers(self) -> int:
        return self.tensor * self.pipeline

    @model_validator(mode="after")
    def _layers_fit_stages(self) -> ParallelConfig:
        layers = self.stage_layers
        if layers is not None and (len(layers) != self.pipeline or min(layers, default=0) < 1):
            raise ValueError(
                f"stage_layers must hold {self.pipeline} numbers of at least 1 (parallel.pipeline), got {layers}"
            )
        return self


class LoadConfig(FrozenConfig):
    """Where a new replica gets its weights from."""

    from_peer: bool = False
    """Copy them over NCCL from the GPUs of a replica that already serves the model, while it goes on serving; from
    files where there is none, or where that fails. The replicas lend their weights to new ones in turn."""
    peer_timeout_s: float = Field(default=60.0, gt=0)
    """What such a copy may take in all; then the files are read."""


class EngineConfig(FrozenConfig):
    """One engine: one model on one device group."""

    model: ModelConfig
    chat: ChatConfig = ChatConfig()
    generation: GenerationConfig = GenerationConfig()
    load: LoadConfig = LoadConfig()
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    kv_events: KVEventsConfig = KVEventsConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @property
    def in_one_process(self) -> bool:
        """Offline: whether the process that has the engine is its one worker too, and not a Ray actor."""
        return self.parallel.num_workers == 1 and not self.runtime.ray_workers

    @model_validator(mode="after")
    def _published_events_are_kept(self) -> EngineConfig:
        if self.kv_events.endpoint is not None and not (self.cache.events and self.cache.prefix_caching):
            raise ValueError(
                "kv_events.endpoint wants cache.events and cache.prefix_caching: nothing is published else"
            )
        return self

    @model_validator(mode="after")
    def _window_fits_stages(self) -> EngineConfig:
        window, most = self.runtime.plans_in_flight, self.parallel.pipeline + 1
        if window is not None and window > most:
            raise ValueError(
                f"runtime.plans_in_flight is {window}; with parallel.pipeline {most - 1} it may be {most} at most"
            )
        return self

    @model_validator(mode="after")
    def _deterministic_has_kernels(self) -> EngineConfig:
        runtime, dtype = self.runtime, self.model.dtype
        if not runtime.deterministic:
            return self
        if runtime.device == "cpu":
            raise ValueError("runtime.deterministic is true, but runtime.device is cpu; allowed there: false")
        if dtype == "float32":
            raise ValueError(
                f"model.dtype is {dtype}, but runtime.deterministic is true; allowed with it: auto, bfloat16, float16"
            )
        if runtime.attention not in ("auto", "raylm"):
            raise ValueError(
                f"runtime.attention is {runtime.attention}, but runtime.deterministic is true; allowed with it: auto, "
                "raylm"
            )
        if self.model.implementation == "transformers":
            raise ValueError(
                "model.implementation is transformers, but runtime.deterministic is true; allowed with it: auto, raylm"
            )
        return self

    @model_validator(mode="after")
    def _drafts_need_one_stage(self) -> EngineConfig:
        if self.speculation.on_device and self.parallel.pipeline > 1:
            raise ValueError(
                f"speculation.method is {self.speculation.method}, which needs parallel.pipeline 1, "
                f"got {self.parallel.pipeline}; allowed with several stages: {', '.join(ON_HOST)}"
            )
        return self

    @model_validator(mode="after")
    def _gpu_type_needs_gpus(self) -> EngineConfig:
        if self.parallel.gpu_type is not None and self.runtime.device == "cpu":
            raise ValueError(f"parallel.gpu_type is {self.parallel.gpu_type}, but runtime.device is cpu")
        return self
