"""A model that transformers alone has: its modules with raylm's attention, cache and linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from raylm.errors import ConfigError
from raylm.layers.attention import CacheScales, LayerInput
from raylm.layers.embedding import VocabParallelEmbedding
from raylm.layers.expert_weights import ExpertWeights
from raylm.layers.slots import Loadable, Slot, SlotName, empty_parameter, slots_of
from raylm.layers.weight import Weight
from raylm.log import get_logger
from raylm.models.blocks import Build
from raylm.models.decoder import DecoderModel
from raylm.models.families.through_transformers import transformers_config
from raylm.models.transformers_parts import (
    ATTENTION,
    Elsewhere,
    Given,
    Head,
    PagedStep,
    TiedHead,
    split_experts,
    split_linears,
)
from raylm.parallel.collectives import share_of

logger = get_logger(__name__)
META = torch.device("meta")


class TransformersModel(DecoderModel):
    """A decoder whose parts are transformers'. What it takes and returns is as DecoderModel says.

    Raises ConfigError for a model whose attention cannot be replaced, and for one that cannot be split as asked.
    """

    def __init__(self, build: Build) -> None:
        nn.Module.__init__(self)  # DecoderModel's would make raylm's own layers.
        self.arch, self.context, self.dtype = build.arch, build.context, build.dtype
        self.layer_numbers = build.context.layers(build.arch.num_layers)
        self.runs_layers_together = False
        self._build = build
        self._windows = [layer.window for layer in build.arch.layers]
        causal = _skeleton(build)
        logger.info("layers: %s of transformers, with raylm's attention and linear layers", type(causal).__name__)
        self._prefix = causal.base_model_prefix
        self.backbone = getattr(causal, self._prefix)
        self._all_names = frozenset(
            name.removeprefix(f"{self._prefix}.")
            for named in (causal.named_parameters(remove_duplicate=False), causal.named_buffers())
            for name, _ in named
        )
        head = causal.get_output_embeddings()
        setattr(causal, self._prefix, Given())
        self.causal = causal
        self._leave_to_other_stages()
        self.embedding = self._make_embedding()
        self._make_head(head)
        split_experts(self.backbone, build)
        split_linears(self.backbone, self.backbone.config.base_model_tp_plan, build)
        self._slots = self._make_parameters()
        if build.context.device != META:
            self._make_buffers()
        self.eval()

    def forward(self, given: Tensor, step: list[LayerInput]) -> Tensor:
        """As DecoderModel.forward."""
        hidden = self.embedding(given) if self.context.is_first_stage else given
        layers = dict(zip(self.layer_numbers, step, strict=True))
        paged = PagedStep(self._build.attention, layers, self._windows, self._build.cache_scales)
        output = self.backbone(
            inputs_embeds=hidden.unsqueeze(0),
            position_ids=step[0].positions.unsqueeze(0),
            use_cache=False,
            paged_step=paged,
        )
        if missing := layers.keys() - paged.attended:
            raise ConfigError(f"layer {min(missing)} of this model has no attention; allowed: attention in every layer")
        found: Tensor = output.last_hidden_state.squeeze(0)
        return found

    def logits(self, hidden: Tensor, *, split: bool = False) -> Tensor:
        """As DecoderModel.logits."""
        found: Tensor = self.causal(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)
        return found[share_of(len(found), self.context)] if split else found

    def scale_cache(self, scales: Mapping[int, CacheScales]) -> None:
        """As DecoderModel.scale_cache."""
        self._build = replace(self._build, cache_scales=scales)

    def is_elsewhere(self, parameter: str) -> bool:
        """As DecoderModel.is_elsewhere."""
        top, number, *_ = parameter.split(".") + [""]
        if self.context.pipeline_size > 1 and top == "layers" and number.isdecimal():
            return int(number) < self.arch.num_layers and int(number) not in self.layer_numbers
        return parameter in self._all_names and (parameter, None) not in self._slots

    def slots(self) -> dict[SlotName, Slot]:
        """By the names of transformers' parameters, without that of the whole."""
        return self._slots

    def _leave_to_other_stages(self) -> None:
        if self.context.pipeline_size == 1:
            return
        plan = self.backbone.config.base_model_pp_plan or {}
        if not {"layers", "norm"} <= plan.keys():
            raise ConfigError(
                f"parallel.pipeline is {self.context.pipeline_size}, but this model runs through transformers, which "
                "has no plan to split it into stages; allowed: 1"
            )
        for number in range(self.arch.num_layers):
            if number not in self.layer_numbers:
                self.backbone.layers[number] = Elsewhere()
        if not self.context.is_last_stage:
            self.backbone.norm = Elsewhere()

    def _make_embedding(self) -> nn.Module:
        """The embedding of this stage; one that does no more than look up is split between tensor ranks."""
        embedding: nn.Module = self.backbone.get_input_embeddings()
        if not self.context.is_first_stage and not (self.context.is_last_stage and self.arch.tie_embeddings):
            embedding = Elsewhere()
        elif type(embedding) is nn.Embedding:
            shape = (embedding.num_embeddings, embedding.embedding_dim)
            embedding = VocabParallelEmbedding(*shape, context=self.context, dtype=self.dtype)
        self.backbone.set_input_embeddings(embedding)
        return embedding

    def _make_head(self, given: nn.Module | None) -> None:
        path = next((path for path, module in self.causal.named_modules() if module is given), None)
        if path is None or type(given) is not nn.Linear:
            raise ConfigError(f"{type(self.causal).__name__} of transformers has no head over the vocabulary")
        head: nn.Module = Elsewhere()
        if self.context.is_last_stage and self.arch.tie_embeddings:
            head = TiedHead(self.embedding)
        elif self.context.is_last_stage:
            shape = (given.out_features, given.in_features)
            head = Head(*shape, context=self.context, dtype=self.dtype, bias=given.bias is not None)
        self.causal.set_submodule(path, head)

    def _make_parameters(self) -> dict[SlotName, Slot]:
        """Allocate the parameters of modules that are still transformers', and the buffers that checkpoints have, whole
        on every rank. Returns the slots of the whole model."""
        slots: dict[SlotName, Slot] = {}
        for top in (self.backbone, self.causal):
            slots |= slots_of(top)
            for path, module in top.named_modules():
                if isinstance(module, Loadable | Weight | ExpertWeights):
                    continue
                stored = [
                    (name, x) for name, x in module._buffers.items() if name not in module._non_persistent_buffers_set
                ]
                for name, tensor in (*module._parameters.items(), *stored):
                    if tensor is None:
                        continue
                    made = self._empty_like(tensor, f"{path}.{name}")
                    module._buffers.pop(name, None)
                    module.register_parameter(name, made)
                    slots[f"{path}.{name}".lstrip("."), None] = Slot(made.view(made.shape or -1), made.shape or (1,))
        return slots

    def _empty_like(self, tensor: Tensor, name: str) -> nn.Parameter:
        if tensor.ndim > 2:
            raise ConfigError(
                f"{type(self.causal).__name__} of transformers has {name} of shape {tuple(tensor.shape)}; allowed: "
                "parameters of 1 or 2 dimensions, or gated experts without biases"
            )
        return empty_parameter(*tensor.shape, dtype=tensor.dtype, device=self.context.device)

    @torch.inference_mode()
    def _make_buffers(self) -> None:
        """Fill the buffers that no checkpoint has, such as rotary frequencies: transformers computes them again."""
        for top in (self.backbone, self.causal):
            for path, module in top.named_modules():
                names = [name for name, buffer in module._buffers.items() if buffer is not None]
                for name in names:
                    made = torch.empty_like(module.get_buffer(name), device=self.context.device)
                    module._buffers[name] = made.fill_(torch.nan if made.is_floating_point() else -1)
                if names:
                    self.causal._init_weights(module)
                for name in names:
                    buffer = module.get_buffer(name)
                    if bool((buffer != buffer).any() | (buffer == -1).all()):
                        raise ConfigError(
                            f"{type(self.causal).__name__} of transformers has the buffer {path}.{name}, whose values "
                            "it cannot compute anew; no checkpoint has them"
                        )


def _skeleton(build: Build) -> PreTrainedModel:
    """All modules of the model, without memory."""
    config = transformers_config(build.arch.transformers_config)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    if not kind._supports_attention_backend:
        raise ConfigError(
            f"{kind.__name__} of transformers computes attention by itself, so that raylm's cannot take its place"
        )
    with META:
        causal: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, dtype=build.dtype
        )
    return causal
