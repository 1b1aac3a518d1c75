"""What draft heads compute, in plain torch over a whole sequence, without a cache: read from the checkpoints' files.

After the code of their authors: SafeAILab's EAGLE (model/cnets.py) and MiMo's modeling_mimo.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.support import checkpoints


class _Reference:
    """The files of a checkpoint, and the parts that heads are made of."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")

    def attention(self, x: Tensor, name: str) -> Tensor:
        """x [T, ...] at positions 0 to T - 1."""
        head_dim, count = self.config["head_dim"], len(x)
        q, k, v = (self.linear(x, f"{name}.{part}_proj").view(count, -1, head_dim) for part in "qkv")
        q, k = self._rotated(q), self._rotated(k)
        groups = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.linear(torch.einsum("hqk,khd->qhd", probs, v).flatten(1), f"{name}.o_proj")

    def _rotated(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        rope = self.config.get("rope_parameters") or self.config
        angles = torch.outer(torch.arange(len(x)), rope["rope_theta"] ** (-torch.arange(0, size, 2) / size))
        cos, sin = (torch.cat((f, f), -1)[:, None] for f in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


class Mtp(_Reference):
    """MiMo's layer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._base = checkpoints.reference(folder)
        self._before_norm: list[Tensor] = []
        self._base.model.norm.register_forward_pre_hook(lambda norm, args: self._before_norm.append(args[0][0]))

    @torch.inference_mode()
    def drafts(self, known: list[int], count: int) -> list[int]:
        """The tokens that it drafts behind the known ones."""
        self._base(torch.tensor([known[:-1]]))
        hidden, tokens = self._before_norm.pop(), known
        for _ in range(count):
            out = self._layer(hidden, torch.tensor(tokens[1:]))
            tokens = [*tokens, int(self.linear(out[-1], "lm_head").argmax())]
            hidden = torch.cat((hidden, out[-1:]))
        return tokens[len(known) :]

    def _layer(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        own = "model.mtp_layers.0."
        embedded = self.tensors["model.embed_tokens.weight"][next_tokens]
        parts = self.norm(hidden, own + "hidden_layernorm"), self.norm(embedded, own + "token_layernorm")
        x = self.linear(torch.cat(parts, -1), own + "input_proj")
        x = x + self.attention(self.norm(x, own + "input_layernorm"), own + "self_attn")
        x = x + self.mlp(self.norm(x, own + "post_attention_layernorm"), own + "mlp")
        return self.norm(x, own + "final_layernorm")


class Eagle3(_Reference):
    """An EAGLE-3 head beside its target."""

    def __init__(self, folder: Path, target: Path) -> None:
        super().__init__(folder)
        self._target = checkpoints.reference(target)
        self._layers = self.config["eagle_aux_hidden_state_layer_ids"]

    @torch.inference_mode()
    def drafts(self, known: list[int], count: int) -> list[int]:
        """The tokens that it drafts behind the known ones."""
        states, handles = {}, []
        parts = [*self._target.model.layers, self._target.model.norm]
        for number, part in enumerate(parts):
            handles.append(part.register_forward_pre_hook(lambda _, args, n=number: states.update({n: args[0][0]})))
        self._target(torch.tensor([known[:-1]]))
        for handle in handles:
            handle.remove()
        hidden, tokens = self.linear(torch.cat([states[n] for n in self._layers], -1), "fc"), known
        for _ in range(count):
            out = self._layer(hidden, torch.tensor(tokens[1:]))
            index = int(self._logits(self.norm(out[-1], "norm")).argmax())
            offset = int(self.tensors["d2t"][index]) if "d2t" in self.tensors else 0
            tokens = [*tokens, index + offset]
            hidden = torch.cat((hidden, out[-1:]))
        return tokens[len(known) :]

    def _layer(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        own = "midlayer."
        table = self.tensors.get("embed_tokens.weight", self._target.model.embed_tokens.weight)
        embedded, normed = (
            self.norm(table[next_tokens], own + "input_layernorm"),
            self.norm(hidden, own + "hidden_norm"),
        )
        residual = normed if self.config.get("norm_before_residual") else hidden
        x = residual + self.attention(torch.cat((embedded, normed), -1), own + "self_attn")
        return x + self.mlp(self.norm(x, own + "post_attention_layernorm"), own + "mlp")

    def _logits(self, normed: Tensor) -> Tensor:
        return F.linear(normed, self.tensors.get("lm_head.weight", self._target.lm_head.weight))
