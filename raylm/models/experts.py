"""A mixture of experts in place of a layer's MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm import ops
from raylm.layers.experts import ParallelExperts
from raylm.layers.linear import ReplicatedLinear
from raylm.layers.residual import ResidualStream
from raylm.layers.slots import Slot, SlotName, empty_parameter
from raylm.models.arch import ExpertsSpec
from raylm.models.blocks import MLP, Build
from raylm.parallel import collectives


class Router(nn.Module):
    """Which experts each token goes to. Every rank has it whole, and comes to the same choice."""

    def __init__(self, build: Build, spec: ExpertsSpec) -> None:
        super().__init__()
        device = build.context.device
        # Scores by sigmoid are trained in float32.
        dtype = torch.float32 if spec.scores == "sigmoid" else build.dtype
        self.weight = empty_parameter(spec.num_experts, build.arch.hidden_size, dtype=dtype, device=device)
        self.bias = empty_parameter(spec.num_experts, dtype=dtype, device=device) if spec.router_bias else None
        if spec.choice_bias:
            self.e_score_correction_bias = empty_parameter(spec.num_experts, dtype=torch.float32, device=device)
        self._spec = spec
        self._linear = ops.invariant_linear if build.context.deterministic else ops.linear

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden_size] -> weights, float32, and experts, int64: [T, spec.per_token] each."""
        spec = self._spec
        logits = self._linear(x.to(self.weight.dtype), self.weight, self.bias, frozen=True)
        if spec.scores == "sparse_mixer":
            return ops.sparse_mixer(logits, jitter=spec.jitter)
        return ops.route(
            logits,
            self.e_score_correction_bias if spec.choice_bias else None,
            per_token=spec.per_token,
            sigmoid=spec.scores == "sigmoid",
            normalized=spec.normalized,
            scale=spec.scale,
            groups=spec.groups,
            groups_per_token=spec.groups_per_token,
        )

    def slots(self) -> dict[SlotName, Slot]:
        return {(name, None): Slot(parameter, tuple(parameter.shape)) for name, parameter in self.named_parameters()}


class MoE(nn.Module):
    """A router, its experts, and where the family has it an MLP that every token goes through."""

    takes_scaled_rows = False

    def __init__(self, build: Build, spec: ExpertsSpec, *, norm_follows: bool) -> None:
        super().__init__()
        hidden, context, dtype = build.arch.hidden_size, build.context, build.dtype
        self.gate = Router(build, spec)
        self.experts = ParallelExperts(
            spec.num_experts,
            hidden,
            spec.size,
            spec.activation,
            bias=spec.bias,
            limit=spec.limit,
            form=build.scheme.of_experts(build.at("experts").path, spec.num_experts),
            context=context,
            dtype=dtype,
        )
        self.shared_expert = (
            MLP(build.at("shared_expert"), spec.shared, norm_follows=False) if spec.shared is not None else None
        )
        if spec.shared_gate:
            self.shared_expert_gate = ReplicatedLinear(hidden, 1, context=context, dtype=dtype)
        self._is_gated = spec.shared_gate
        self._context = context
        self._norm_follows = norm_follows

    def forward(self, x: ops.Rows) -> Tensor:
        """x, output: [T, hidden_size]; summed over the ranks unless the norm behind it does that."""
        return collectives.all_reduce_or_leave(self.partial(x), self._context, norm_follows=self._norm_follows)

    def partial(self, x: ops.Rows) -> Tensor:
        """This rank's share of the sum."""
        assert isinstance(x, Tensor)
        out: Tensor = self.experts(x, *self.gate(x))
        if self.shared_expert is not None:
            shared = self.shared_expert.partial(x)
            out += F.sigmoid(self.shared_expert_gate(x)) * shared if self._is_gated else shared
        return out

    def add_to(self, stream: ResidualStream, x: ops.Rows) -> None:
        """Add the output to the stream."""
        stream.add(self(x))
