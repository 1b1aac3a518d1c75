#!/usr/bin/env bash
# On a CUDA host: the operators' tests under compute-sanitizer, which looks at every access of raylm's own kernels.
#
#   tests/gpu/sanitize.sh memcheck|racecheck|synccheck|initcheck [PROCESSES] [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
tool=${1:?"memcheck, racecheck, synccheck or initcheck"}
processes=${2:-8}
shift $(($# < 2 ? $# : 2))

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pytest tests/ops -k "not cpu" --collect-only -q --no-header "$@" | grep :: >"$folder/tests"
split -n "r/$processes" "$folder/tests" "$folder/part-"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # each tensor is an allocation, whose ends are known
running=()
for part in "$folder"/part-*; do
    compute-sanitizer --tool "$tool" --kernel-name kns=raylm --error-exitcode 9 --print-limit 5 \
        "$python" -m pytest -q -p no:cacheprovider "@$part" >"$part.log" 2>&1 &
    running+=($!)
done
failed=0
for process in "${running[@]}"; do wait "$process" || failed=1; done
grep -hE "ERROR SUMMARY|RACECHECK SUMMARY|^=+ .*(Invalid|Error|hazard)|^(FAILED|ERROR)|(passed|failed)" "$folder"/part-*.log |
    sort | uniq -c | sort -rn | head -40
exit $failed
