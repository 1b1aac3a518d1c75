"""CPU time of steps of a random mixture of experts, its matrices in blocks and decoded, in turns. A program, no test.

python -m tests.models.mixture_times FILE --rows 1,16,256

FILE is written where it is not there yet: a Mixtral as a GGUF file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as GGMLType

from raylm.models.decoder import DecoderModel
from tests.models.decode_times import inputs
from tests.models.paged import load
from tests.support import checkpoints

_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_OTHERS = ("attn_q", "attn_k", "attn_v", "attn_output", "token_embd", "output")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", default="1,16", help="tokens of a step, each of a sequence of its own")
    parser.add_argument("--steps", type=int, default=10, help="of each side")
    parser.add_argument("--type", default="Q4_0", help="of the experts' blocks; all other matrices are Q8_0")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--size", type=int, default=1024, help="columns between an expert's products")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--per-token", type=int, default=2)
    args = parser.parse_args()
    if not args.file.exists():
        _write(args)
    torch.set_num_threads(1)
    sides = {"decoded": load(args.file), "stored": load(args.file, as_stored=True)}
    for name, model in sides.items():
        print(f"{name}: {sum(x.nbytes for x in model.parameters()) / 1e9:.2f} GB", flush=True)
    for rows in map(int, args.rows.split(",")):
        found = _times(list(sides.values()), rows, args.steps)
        for name, seconds in zip(sides, found, strict=True):
            best, median = min(seconds), statistics.median(seconds)
            print(f"{rows:4} rows, {name}: {best * 1e3:.1f} ms at least, {median * 1e3:.1f} in the median", end="")
            print(f", {rows / median:.1f} tokens a second", flush=True)
        ratios = [decoded / stored for decoded, stored in zip(*found, strict=True)]
        print(f"{rows:4} rows, decoded / stored: {statistics.median(ratios):.2f}", flush=True)


@torch.inference_mode()
def _times(models: list[DecoderModel], rows: int, steps: int) -> list[list[float]]:
    """CPU seconds of each step of each model but the first one. Tokens differ from step to step, and so do the experts
    that they go to."""
    found: list[list[float]] = [[] for _ in models]
    caches = [inputs(model, rows) for model in models]
    generator = torch.Generator().manual_seed(0)
    for step in range(steps + 1):
        tokens = torch.randint(0, models[0].arch.vocab_size, (rows,), generator=generator)
        for model, cache, seconds in zip(models, caches, found, strict=True):
            begin = time.process_time()
            model.logits(model(tokens, cache))
            if step:
                seconds.append(time.process_time() - begin)
    return found


def _write(args: argparse.Namespace) -> None:
    kinds = dict.fromkeys(_EXPERTS, GGMLType[args.type]) | dict.fromkeys(_OTHERS, GGMLType.Q8_0)
    with tempfile.TemporaryDirectory() as folder:
        hf = checkpoints.FAMILIES["mixtral"](
            Path(folder) / "hf",
            num_hidden_layers=args.layers,
            hidden_size=args.hidden,
            intermediate_size=args.size,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 256,
            head_dim=64,
            num_local_experts=args.experts,
            num_experts_per_tok=args.per_token,
            max_position_embeddings=2048,
        )
        checkpoints.write_gguf(hf, args.file, kinds)


if __name__ == "__main__":
    main()
