"""How long a new engine's weights take: from files, not cached and cached by the system, and from a live engine's GPU.

python -m tests.gpu.from_peer_times FOLDER [SHAPE]      on two GPUs; prints one JSON line a case

FOLDER is on a local disk. The checkpoint of SHAPE (llama-3.1-8b, 16 GB) is written into it unless it is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from raylm.bench.dummy import write_shape
from raylm.config.engine import EngineConfig
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig

LAYERS_A_FILE = 8


def write_checkpoint(folder: Path, shape: str) -> int:
    """Random weights under the names of a Llama's or a Qwen3's checkpoint; returns their bytes."""
    write_shape(shape, folder)
    index = folder / "model.safetensors.index.json"
    arch = ArchConfig.from_source(locate(str(folder)))
    if not index.is_file():
        weight_map = {}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for number, shapes in enumerate(_files(arch)):
            file = f"model-{number:05d}.safetensors"
            tensors = {
                name: torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=0.02).cpu()
                for name, size in shapes.items()
            }
            save_file(tensors, folder / file)
            weight_map |= dict.fromkeys(tensors, file)
        torch.cuda.empty_cache()
        index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _files(arch: ArchConfig) -> Iterator[dict[str, tuple[int, ...]]]:
    hidden, inner, width = arch.hidden_size, arch.layers[0].mlp.size, arch.num_heads * arch.head_dim
    kv_width = arch.num_kv_heads * arch.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if arch.qk_norm:
        layer |= {"self_attn.q_norm": (arch.head_dim,), "self_attn.k_norm": (arch.head_dim,)}
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not arch.tie_embeddings:
        ends["lm_head.weight"] = (arch.vocab_size, hidden)
    yield ends
    for first in range(0, arch.num_layers, LAYERS_A_FILE):
        yield {
            f"model.layers.{number}.{name}.weight": size
            for number in range(first, min(first + LAYERS_A_FILE, arch.num_layers))
            for name, size in layer.items()
        }


def forget(folder: Path) -> None:
    """Let the system drop what it has cached of the files."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def start(folder: Path, peers: Sequence[Any] = ()) -> tuple[Any, Any, float]:
    """An engine, what holds its workers, and the seconds that its start took."""
    from ray.util.placement_group import remove_placement_group

    from raylm.engine.factory import engine_over, ray_executor
    from raylm.executor.cluster import reserve

    config = EngineConfig.model_validate(
        {
            "model": {"path": str(folder), "max_model_len": 8192},
            "load": {"from_peer": True},
            "runtime": {"device": "cuda", "ray_workers": True},
        }
    )
    group, worker = reserve(config)
    began = time.perf_counter()
    executor = ray_executor(
        config, group=group, resources=worker, release=lambda: remove_placement_group(group), peers=peers
    )
    engine = engine_over(executor)
    return engine, executor, time.perf_counter() - began


def main(folder: Path, shape: str) -> None:
    size = write_checkpoint(folder, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    live, executor, _ = start(folder)
    for case in ("files, not cached", "files, cached", "peer", "peer, once more"):
        if case == "files, not cached":
            forget(folder)
        engine, _, seconds = start(folder, executor.workers if case.startswith("peer") else ())
        result = {
            "bench": "from_peer",
            "model": shape,
            "case": case,
            "gb": round(size / 1e9, 2),
            "weights_s": round(engine.info.phases["weights"], 3),
            "start_s": round(seconds, 2),
            "phases": {phase: round(value, 3) for phase, value in engine.info.phases.items()},
        }
        print(json.dumps(result), flush=True)
        engine.shutdown()
    live.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "llama-3.1-8b")
