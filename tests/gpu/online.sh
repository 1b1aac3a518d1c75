#!/usr/bin/env bash
# On a CUDA host: `raylm serve` with the shape of Llama-3.1-8B and random weights under a load of 32 requests/s, four seeds
# behind 512 requests that meet the shapes of graphs, once for each setting of the scheduler (default: none, as it is).
# One JSON line a seed.
#
#   tests/gpu/online.sh RESULTS.jsonl [KEY=VALUE...]           such as prefill_chunk=8192 target_itl_ms=20
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
results=${1:?"where the JSON lines go"}
shift

folder=$(mktemp -d)
server=
stop() {
    [ -z "$server" ] || { kill -INT "$server" && wait "$server"; } || true
    server=
}
trap 'stop; rm -rf "$folder"' EXIT
"$python" -m raylm.cli bench shape llama-3.1-8b "$folder/llama-3.1-8b"
cat >"$folder/serve.yaml" <<YAML
proxy_location: HeadOnly
http_options: {host: 127.0.0.1, port: 8000}
applications:
  - {name: llm, route_prefix: /, import_path: "raylm.serving.app:build_ingress", args: {},
     deployments: [{name: OpenAIIngress, num_replicas: 4}]}
  - {name: llama, route_prefix: null, import_path: "raylm.serving.app:build_model",
     args: {engine: "$folder/engine.yaml"}, deployments: [{name: ModelReplica, num_replicas: 1}]}
YAML
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
load() { "$python" -m raylm.cli bench serve --vocab-size 128000 --case "$1" --request-rate 32 --seed "$2"; }
for setting in "${@:-max_num_batched_tokens=8192}"; do
    cat >"$folder/engine.yaml" <<YAML
model: {path: $folder/llama-3.1-8b, load_format: dummy, max_model_len: 8192}
scheduler: {max_num_seqs: 512, ${setting/=/: }}
YAML
    "$python" -m raylm.cli serve "$folder/serve.yaml" >"$folder/log" 2>&1 &
    server=$!
    for _ in $(seq 240); do
        ! grep -q "ready:" "$folder/log" || break
        kill -0 "$server" || { tail -20 "$folder/log" && exit 1; }
        sleep 0.5
    done
    load warm:512:512:128 0 >/dev/null
    for seed in 1 2 3 4; do
        load "$setting:384:512:128" "$seed" >>"$results"
    done
    stop
done
