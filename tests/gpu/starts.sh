#!/usr/bin/env bash
# On a CUDA host: five starts of `raylm serve` with the shape of Llama-3.1-8B and random weights, up to the first answer.
# One JSON line a start, with its parts; the median of ready_s goes to docs/performance.md.
#
#   tests/gpu/starts.sh RESULTS.jsonl [STARTS]
#
# What processes import ahead can be compared by RAY_preload_python_modules in the environment; nothing: x.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
results=${1:?"where the JSON lines go"}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m raylm.cli bench shape llama-3.1-8b "$folder/llama-3.1-8b"
echo "model: {path: $folder/llama-3.1-8b, load_format: dummy, max_model_len: 8192}" >"$folder/engine.yaml"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$python" -m raylm.cli bench startup --serve "$folder/engine.yaml" --repeat "${2:-5}" --output "$results"
