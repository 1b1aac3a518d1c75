"""What a model needs of GPUs, worked out where there is none: weights and cache by the code that the workers run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from raylm.config.engine import ParallelConfig
from raylm.config.resolve import ResolvedEngine
from raylm.errors import ConfigError
from raylm.layers.dtypes import dtype_name
from raylm.layers.experts import ParallelExperts
from raylm.layers.slots import ExpertBlocks, PatchForm
from raylm.layers.weight import PatchedWeight
from raylm.models.arch import ArchConfig, ExpertsSpec, MLPSpec
from raylm.models.cache_spec import CacheSpec, cache_specs
from raylm.models.check import quantises, target_arch
from raylm.models.outline import StageOutline, outline
from raylm.models.scheme import AS_NUMBERS, Scheme, wanted_scheme
from raylm.planning.gpus import Gpu
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.device import choose_cache_dtype, choose_dtype
from raylm.worker.drafting import outline_drafting
from raylm.worker.request_table import TableSizes

GIB = 1 << 30
CUDA_BYTES = 5 * GIB // 4
"""Set aside for CUDA itself, the libraries' workspaces and the CUDA graphs. A worker measures it; a plan cannot. On an
H100 that was 0.74 GiB, and 0.39 to 0.56 for the graphs of 256 to 512 sequences of a model of 8 billion parameters."""
NCCL_BYTES = 3 * GIB // 4
"""The same for NCCL and the memory that GPUs read of each other, where there are several."""
_ONE_KERNEL_ROWS = 1024
"""From here on gate and up have their activation in one kernel on Hopper GPUs."""
_PATCHED_ROWS = 1024
"""Up to here products read patches as they are."""
TENSOR_SIZES = (1, 2, 4, 8, 16)


class _Stage(NamedTuple):
    """Bytes on one GPU of a pipeline stage."""

    held: int
    """The weights, those of a model that drafts among them."""
    read: int
    """The model's weights that a large decode step reads: of an embedding that is no head, only a few rows."""
    values: int
    """How many values the layers' weights are."""
    experts: int
    """Bytes of their experts."""
    expert_values: int
    expert_form: PatchForm | ExpertBlocks | None
    groups: CacheGroups
    """Their layout is the same in all stages."""
    kv: int
    """Keys and values that one request of `context` tokens makes a step read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a model takes and gives on tensor * pipeline GPUs. Bytes a GPU are those of the stage with most of them."""

    dtype: str
    quantisation: str | None
    """How the checkpoint stores its weights."""
    cache_dtype: str
    """Of keys and values."""
    kept_as: str | None
    """What linear layers are in other than `dtype`: FP8 with a scale a row, as stored or quantised while they are
    loaded, or codes in patches."""
    experts_kept_as: str | None
    """The same of experts."""
    tensor: int
    pipeline: int
    context: int
    """Tokens of one request, for what follows."""
    weight_bytes: int
    """Of the whole model."""
    weight_bytes_gpu: int
    kv_bytes_token: int
    """Of the whole model, for a token that every layer keeps."""
    kv_bytes_token_gpu: int
    memory_bytes: int
    """What cache.gpu_memory_utilization allows on one GPU."""
    step_bytes: int
    """An estimate of the largest step's activations and logits, and of the rotary tables."""
    table_bytes: int
    """The request table, for the longest request that the cache holds."""
    cuda_bytes: int
    cache_bytes: int
    """What is left for the cache on the fullest GPU; below 0 where the rest does not fit."""
    num_blocks: int
    cache_tokens: int
    concurrency: float
    """Requests of `context` tokens that the cache holds at once."""
    problem: str | None
    """Why it does not fit."""
    decode_tokens_s: float
    """Bound from the memory's bandwidth for one short request."""
    batch: int
    """Requests of `context` tokens that run at once, by the cache and scheduler.max_num_seqs."""
    batch_tokens_s: float
    """The same bound for all of them together."""
    prefill_tokens_s: float | None
    """Bound from the rate of products, of the layers alone; None for float32."""
    in_8_bits: bool
    """Whether products of linear layers or experts have the rate of 8-bit numbers in long steps."""


class Sizing:
    """One model and one kind of GPU; plans for as many of them as are asked for."""

    def __init__(
        self,
        config: ResolvedEngine,
        arch: ArchConfig,
        gpu: Gpu,
        *,
        context: int,
        stored: Callable[[torch.dtype], Scheme] | None = None,
    ) -> None:
        """`stored` says what Hopper GPUs keep of a checkpoint as it is stored, beside activations of a type; without
        it, the configuration does. Raises ConfigError when the model does not take requests of `context` tokens."""
        limit = config.model.max_model_len or arch.max_position
        if not 2 <= context <= limit:
            raise ConfigError(f"--context is {context}, but this model takes requests of 2 to {limit} tokens")
        arch = target_arch(arch, config)
        self._config = config
        self._arch = arch
        self._gpu = gpu
        self._context = context
        self._dtype = choose_dtype(config.model.dtype, arch.dtype, torch.device("cuda"))
        self._cache_dtype = choose_cache_dtype(config.cache.dtype, self._dtype)
        self._scheme = self._choose_scheme(config, stored)
        self._limit = limit

    def plan(self, parallel: ParallelConfig) -> Plan:
        """Raises ConfigError when the model cannot be split so."""
        stages, whole = self._stages(parallel), self._stages(ParallelConfig())[0]
        budget = int(self._gpu.memory_gib * GIB * self._config.cache.gpu_memory_utilization)
        step = self._step_bytes(parallel.tensor)
        beside = CUDA_BYTES + (NCCL_BYTES if parallel.num_workers > 1 else 0)
        tables = TableSizes(self._config.scheduler.max_num_seqs, whole.groups.layout, self._chunk, self._limit)
        fitting = min(
            tables.blocks_beside(budget - stage.held - step - beside, bytes_per_block=stage.groups.block_bytes)
            for stage in stages
        )
        num_blocks = self._config.cache.num_blocks or fitting
        table = tables.bytes_for(min(num_blocks, fitting))
        left = [budget - stage.held - step - table - beside for stage in stages]
        per_request = whole.groups.layout.blocks_for(self._context, chunk=self._chunk)
        concurrency = max(num_blocks - 1, 0) / per_request
        batch = max(1, min(int(concurrency), self._config.scheduler.max_num_seqs))
        return Plan(
            dtype=dtype_name(self._dtype),
            quantisation=self._quantisation(),
            cache_dtype=dtype_name(self._cache_dtype),
            kept_as=self._kept_as,
            in_8_bits=self._gpu.fp8_tflops is not None and (self._scheme.rounds_rows or self._scheme.rounds_experts),
            experts_kept_as=next((str(stage.expert_form) for stage in stages if stage.expert_form is not None), None),
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            context=self._context,
            weight_bytes=whole.held,
            weight_bytes_gpu=max(stage.held for stage in stages),
            kv_bytes_token=self._token_bytes(whole.groups),
            kv_bytes_token_gpu=max(self._token_bytes(stage.groups) for stage in stages),
            memory_bytes=budget,
            step_bytes=step,
            table_bytes=table,
            cuda_bytes=beside,
            cache_bytes=min(left),
            num_blocks=num_blocks,
            cache_tokens=int(concurrency * self._context),
            concurrency=concurrency,
            problem=self._problem(max(stage.held for stage in stages), min(left), fitting, concurrency),
            decode_tokens_s=self._gpu.bandwidth_gb_s * 1e9 / sum(self._read(stage, 1) for stage in stages),
            batch=batch,
            batch_tokens_s=self._batch_tokens_s(stages, batch),
            prefill_tokens_s=self._prefill_tokens_s(whole, parallel.num_workers),
        )

    def _choose_scheme(self, config: ResolvedEngine, stored: Callable[[torch.dtype], Scheme] | None) -> Scheme:
        """What linear layers are on the GPU. Modules that the checkpoint leaves out count as quantised."""
        if quantises(self._arch, config.model):
            if self._gpu.fp8_tflops is None:
                raise ConfigError("model.quantization is fp8, which needs a Hopper GPU; --gpu is another kind")
            if self._dtype.itemsize != 2:
                raise ConfigError("model.quantization is fp8, but model.dtype is float32; allowed: bfloat16, float16")
        has_kernels = self._gpu.fp8_tflops is not None and self._dtype.itemsize == 2
        if not has_kernels:
            return AS_NUMBERS
        if stored is None or quantises(self._arch, config.model) or config.model.load_format == "dummy":
            return wanted_scheme(self._arch, config.model, self._dtype)
        is_read = config.model.weights == "stored" and not config.runtime.deterministic
        return stored(self._dtype) if is_read else AS_NUMBERS

    @property
    def _in_patches(self) -> bool:
        return bool(self._scheme.patches_of_linears)

    @property
    def _kept_as(self) -> str | None:
        return "FP8" if self._scheme.scales_rows else " and ".join(self._scheme.patches_of_linears) or None

    def _quantisation(self) -> str | None:
        quantisation = self._arch.quantisation
        return str(quantisation) if quantisation is not None and quantisation.of_weights else None

    def attempts(self, pipeline: int) -> dict[int, str | None]:
        """Tensor ranks, up to the first number of them that fits, each with why it does not."""
        found: dict[int, str | None] = {}
        for tensor in TENSOR_SIZES:
            try:
                found[tensor] = self.plan(ParallelConfig(tensor=tensor, pipeline=pipeline)).problem
            except ConfigError as error:
                found[tensor] = str(error)
            if found[tensor] is None:
                break
        return found

    @property
    def _chunk(self) -> int:
        return self._config.scheduler.max_num_batched_tokens

    def _stages(self, parallel: ParallelConfig) -> list[_Stage]:
        """The stages of a pipeline, each as its fullest rank has it. Raises ConfigError where it cannot be split so."""
        return [self._stage(stage) for stage in outline(self._arch, parallel, self._dtype, self._scheme)]

    def _stage(self, stage: StageOutline) -> _Stage:
        """Measured on the model itself, built without memory."""
        arch, (context, model) = self._arch, stage
        held = _bytes(model)
        is_head = context.is_last_stage and arch.tie_embeddings
        read = held - (_bytes(model.embed_tokens) if context.is_first_stage and not is_head else 0)
        block_size = self._config.cache.block_size
        specs = cache_specs(arch, context, block_size=block_size, dtype=self._cache_dtype)
        groups = CacheGroups.choose(specs, block_size=block_size, max_len=self._limit).of_stage(model.layer_numbers)
        is_dummy = self._config.model.load_format == "dummy"
        drafting = outline_drafting(
            self._config.speculation, model, dummy=is_dummy, block_size=block_size, cache_dtype=self._cache_dtype
        )
        if drafting is not None:
            held += drafting.weight_bytes
            groups = groups._replace(drafts=drafting.layers)
        kv = sum(self._seen_bytes(specs[layer]) for layer in model.layer_numbers)
        experts = [module for module in model.modules() if isinstance(module, ParallelExperts)]
        values = sum(parameter.numel() for parameter in model.layers.parameters())
        for module in model.layers.modules():
            if isinstance(module, PatchedWeight):
                values += module.num_values - module.patches.numel()
        in_codes = sum(
            module.num_values - sum(matrix.numel() for matrix in module.matrices.parameters()) for module in experts
        )
        of_experts = in_codes + sum(parameter.numel() for module in experts for parameter in module.parameters())
        expert_bytes, form = sum(map(_bytes, experts)), experts[0].form if experts else None
        return _Stage(held, read, values + in_codes, expert_bytes, of_experts, form, groups, kv)

    def _seen_bytes(self, spec: CacheSpec) -> int:
        """What a layer reads of its cache for the next token of one request of `context` tokens."""
        return spec.block_bytes * min(spec.window or self._context, self._context) // self._config.cache.block_size

    def _read(self, stage: _Stage, tokens: float) -> int:
        """Of the weights, in a decode step of so many tokens."""
        return stage.read - self._unread(stage, tokens)

    def _unread(self, stage: _Stage, tokens: float) -> int:
        """The weights of the experts that none of the tokens goes to, where they choose evenly."""
        specs = [layer.mlp for layer in self._arch.layers if isinstance(layer.mlp, ExpertsSpec)]
        return int(stage.experts * (1 - specs[0].per_token / specs[0].num_experts) ** tokens) if specs else 0

    def _token_bytes(self, groups: CacheGroups) -> int:
        """A token has a block's share in every group."""
        return groups.block_bytes * len(groups.layers) // self._config.cache.block_size

    def _step_bytes(self, tensor: int) -> int:
        arch, item = self._arch, self._dtype.itemsize
        mlp = max(self._mlp_columns(layer.mlp, tensor) for layer in arch.layers)
        heads = (2 * arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim // tensor
        hidden = 2 * arch.hidden_size
        # Twice while they are sampled from, when the layers' activations are gone.
        logit = 8 + item if arch.logits_soft_cap else 2 * item  # capped in float32
        logits = logit * self._config.scheduler.max_num_seqs * arch.vocab_size
        ropes = {layer.rope for layer in arch.layers if layer.rope is not None}
        rotary = sum(arch.max_position * rope.size(arch.head_dim) * 4 for rope in ropes)
        # Of many rows, products decode their weight first.
        largest = 2 * max(layer.mlp.size for layer in arch.layers) // tensor * arch.hidden_size * item
        decodes = self._in_patches and not self._scheme.rounds_rows and self._chunk > _PATCHED_ROWS
        decoded = largest if decodes else 0
        return max(self._chunk * (max(mlp, heads) + hidden) * item + decoded, logits) + rotary

    def _mlp_columns(self, mlp: MLPSpec | ExpertsSpec, tensor: int) -> int:
        """Numbers a token that are there at once."""
        size, hidden = mlp.size // tensor, self._arch.hidden_size
        if isinstance(mlp, ExpertsSpec):
            # Each token's copies, what its experts make of them, and that in float32.
            return mlp.per_token * (3 * size + 3 * hidden)
        if self._scheme.scales_rows:
            return 5 * size // 2  # gate and up, and a byte for each number of their activation
        if self._in_patches and mlp.gated and self._scheme.rounds_rows:
            return 3 * size // 2  # gate's and up's activation, and a byte for each of its numbers
        is_hopper = self._gpu.fp8_tflops is not None
        plain_in_one = is_hopper and not mlp.bias and self._dtype.itemsize == 2 and self._chunk >= _ONE_KERNEL_ROWS
        in_one = self._chunk <= _PATCHED_ROWS if self._in_patches else plain_in_one
        return size if mlp.gated and in_one else 3 * size

    def _batch_tokens_s(self, stages: list[_Stage], batch: int) -> float:
        """Every stage is busy with its part of the batch; the slowest sets the pace."""
        part = batch / len(stages)
        return (
            part * self._gpu.bandwidth_gb_s * 1e9 / max(self._read(stage, part) + part * stage.kv for stage in stages)
        )

    def _prefill_tokens_s(self, whole: _Stage, num_gpus: int) -> float | None:
        if self._dtype.itemsize != 2:
            return None
        read = 1 - self._unread(whole, 1) / whole.experts if whole.experts else 0
        of_experts, others = read * whole.expert_values, whole.values - whole.expert_values

        def rate(rounds: bool) -> float:
            return (self._gpu.fp8_tflops if rounds else None) or self._gpu.bf16_tflops

        time = 2 * others / rate(self._scheme.rounds_rows) + 2 * of_experts / rate(self._scheme.rounds_experts)
        return num_gpus * 1e12 / time

    def _problem(self, held: int, left: int, fitting: int, concurrency: float) -> str | None:
        utilization, num_blocks = self._config.cache.gpu_memory_utilization, self._config.cache.num_blocks
        if left < 0:
            budget = int(self._gpu.memory_gib * GIB * utilization)
            beside = budget - left - held
            return (
                f"{held / GIB:.1f} GiB of weights a GPU and {beside / GIB:.1f} for the largest step and CUDA are more "
                f"than the {budget / GIB:.1f} GiB that cache.gpu_memory_utilization {utilization:g} of "
                f"{self._gpu.memory_gib:g} GiB allows"
            )
        if num_blocks is not None and num_blocks > fitting:
            return f"cache.num_blocks {num_blocks} is more than the {fitting} that {left / GIB:.1f} GiB hold"
        if concurrency < 1:
            tokens = int(concurrency * self._context)
            return (
                f"the {left / GIB:.1f} GiB left for the KV cache hold {tokens:,} tokens, "
                f"less than one request of {self._context:,}"
            )
        return None


def _bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
