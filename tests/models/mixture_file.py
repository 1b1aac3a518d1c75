"""Writes a random mixture of experts as a GGUF file, for `raylm bench throughput FILE --weights stored` and `decoded`.

python -m tests.models.mixture_file FILE --type Q4_0
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from gguf import GGMLQuantizationType as GGMLType

from tests.support import checkpoints

_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_OTHERS = ("attn_q", "attn_k", "attn_v", "attn_output", "token_embd", "output")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="Q4_0", help="of the experts' blocks; all other matrices are Q8_0")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--size", type=int, default=1024, help="columns between an expert's products")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--per-token", type=int, default=2)
    args = parser.parse_args()
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
