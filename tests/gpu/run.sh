#!/usr/bin/env bash
# On a CUDA host, without network: builds the extension where nvcc is and it is not installed, runs every test
# that a GPU takes part in, and measures the cases of docs/performance.md.
#
#   tests/gpu/run.sh RESULTS.jsonl [PYTEST ARGUMENTS]     build, test, measure
#   tests/gpu/run.sh -t [PYTEST ARGUMENTS]                build, test
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
results=${1:?"where the JSON lines go, or -t for tests alone"}
shift

if ! "$python" -c "import raylm_cuda" 2>/dev/null && command -v nvcc >/dev/null; then
    "$python" -m pip install --no-index --no-deps --no-build-isolation ./cuda_ext
fi
# The references are small: with threads for all cores of a large host they take many times as long.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} "$python" -m pytest tests/gpu tests/ops tests/layers tests/worker tests/parallel "$@"
[ "$results" = -t ] && exit

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
: >"$results"
parallel=()
measure() { # NAME SEQS TOKENS CASE...: one process, one JSON line a case
    local name=$1 seqs=$2 tokens=$3 cases=()
    shift 3
    for case in "$@"; do cases+=(--case "$case"); done
    "$python" -m raylm.cli bench throughput "$folder/$name" --load-format dummy --max-model-len 8192 \
        --max-num-batched-tokens "$tokens" --max-num-seqs "$seqs" "${parallel[@]}" "${cases[@]}" >>"$results"
}
for name in llama-3.1-8b qwen3-0.6b; do
    "$python" -m raylm.cli bench shape "$name" "$folder/$name"
    "$python" -m raylm.cli bench startup "$folder/$name" --load-format dummy --max-model-len 8192 >>"$results"
    "$python" -m raylm.cli bench trace "$folder/$name" --load-format dummy --max-model-len 8192 \
        --plot "${results%.jsonl}-$name.png" >>"$results"
    measure "$name" 256 8192 lat1:1:128:256 lat32:32:128:256
    "$python" -m tests.gpu.submit_times "$folder/$name" >>"$results"
done
measure llama-3.1-8b 256 8192 dec256:256:128:512
measure llama-3.1-8b 512 8192 thr:512:1024:128 pre:64:4096:1
measure qwen3-0.6b 1024 8192 thr:1024:256:256
"$python" -m raylm.cli bench shape qwen3-30b-a3b "$folder/qwen3-30b-a3b"
measure qwen3-30b-a3b 512 8192 lat1:1:128:256 lat32:32:128:256 dec256:256:128:512 thr:512:1024:128
"$python" -m raylm.cli bench experts "$folder/qwen3-30b-a3b" --load-format dummy --max-model-len 8192 \
    --max-num-seqs 512 --batch 1,32,256,512 >>"$results"
for script in attention linear gated_linear experts few_layers; do "$python" -m "tests.gpu.${script}_times" >>"$results"; done
"$python" -m tests.gpu.load_times "$folder/checkpoint" >>"$results"
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
if [ "$gpus" -ge 2 ]; then
    "$python" -m raylm.cli bench all-reduce >>"$results"
    parallel=(--tensor 2)
    measure llama-3.1-8b 256 8192 lat1:1:128:256 lat32:32:128:256 dec256:256:128:512
    measure llama-3.1-8b 512 8192 thr:512:1024:128
    parallel=(--pipeline 2)
    measure llama-3.1-8b 1024 8192 thr:512:1024:128
    RAY_AUTH_MODE=token "$python" -m tests.gpu.from_peer_times "$folder/checkpoint" >>"$results"
fi
cat "$results"
