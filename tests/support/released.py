"""Released checkpoints as their vendors publish them: every field of config.json that says how the model is made, and
the name and shape of every tensor, with the sizes shrunk. Layers are all alike but where a name says which."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

V, H, INNER, E, P = 96, 64, 80, 4, 32
"""The vocabulary, the model's width, the columns of an MLP, the experts and the positions of all of them."""
LAYERS, HEADS, KV, D = 2, 4, 2, 16
Shapes = dict[str, tuple[int, ...]]


class Released(NamedTuple):
    """`shapes`: of the tensors, "*" standing for the number of a layer. `types`: by the end of the name, of those that
    are no weights."""

    config: Mapping[str, object]
    shapes: Shapes
    types: Mapping[str, torch.dtype] = {}
    file: str = "model.safetensors"
    tied: tuple[str, ...] = ()
    """The embedding, and the head that is stored beside it all the same."""
    in_transformers: bool = True
    """transformers computes the same from the folder; it has not the code of the others, or not what they become for
    long texts."""

    def write(self, folder: Path) -> Path:
        """The folder, with random weights that a mistake would show in."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        generator = torch.Generator().manual_seed(0)
        tensors = {name: self._tensor(name, shape, generator) for name, shape in self._each()}
        if self.tied:
            tensors[self.tied[1]] = tensors[self.tied[0]].clone()
        save: Callable[[dict[str, Tensor], Path], object] = save_file if "safetensors" in self.file else torch.save
        save(tensors, folder / self.file)
        return folder

    def _each(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in self.shapes.items():
            counts = (range(LAYERS) if "*" in name else [None], range(E) if "#" in name else [None])
            for layer in counts[0]:
                for expert in counts[1]:
                    yield name.replace("*", str(layer)).replace("#", str(expert)), shape

    def _tensor(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        dtype = next((dtype for end, dtype in self.types.items() if name.endswith(end)), None)
        if dtype is not None:
            return torch.ones(shape, dtype=dtype)
        return torch.randn(shape, generator=generator) * 0.15


def matrices(prefix: str, rows: Mapping[str, tuple[int, int]], *, bias: bool = False) -> Shapes:
    """Of linear layers, [out, in]."""
    found: Shapes = {f"{prefix}{name}.weight": shape for name, shape in rows.items()}
    return found | ({f"{prefix}{name}.bias": shape[:1] for name, shape in rows.items()} if bias else {})


def norms_of(*names: str, bias: bool = False, size: int = H) -> Shapes:
    found: Shapes = {f"{name}.weight": (size,) for name in names}
    return found | ({f"{name}.bias": (size,) for name in names} if bias else {})


def llama(
    *,
    heads: int = HEADS,
    kv: int = KV,
    inner: int = INNER,
    head: bool = True,
    bias: tuple[str, ...] = (),
    mlp: bool = True,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    prefix: str = "model.",
) -> Shapes:
    """By transformers' names. `bias`: of the projections of attention that have one."""
    layer = f"{prefix}layers.*."
    rows = {"q_proj": (heads * D, H), "k_proj": (kv * D, H), "v_proj": (kv * D, H), "o_proj": (H, heads * D)}
    found: Shapes = {f"{prefix}embed_tokens.weight": (V, H), f"{prefix}norm.weight": (H,)}
    for name, shape in rows.items():
        found |= matrices(f"{layer}self_attn.", {name: shape}, bias=name in bias)
    if mlp:
        found |= matrices(f"{layer}mlp.", {"gate_proj": (inner, H), "up_proj": (inner, H), "down_proj": (H, inner)})
    found |= norms_of(*(layer + norm for norm in norms))
    return found | ({"lm_head.weight": (V, H)} if head else {})


SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "max_position_embeddings": P,
}


MIXTRAL_EXPERT = {"w1": (INNER, H), "w2": (H, INNER), "w3": (INNER, H)}
EXPERT = {"gate_proj": (INNER, H), "up_proj": (INNER, H), "down_proj": (H, INNER)}
