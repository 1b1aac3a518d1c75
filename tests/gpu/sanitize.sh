#!/usr/bin/env bash
# On a CUDA host: the operators' tests under compute-sanitizer, which looks at every access of raylm's own kernels.
#
#   tests/gpu/sanitize.sh memcheck|racecheck|synccheck|initcheck [PROCESSES [EVERY [LOGS [TESTS...]]]]
#
# PROCESSES (4) share the GPUs that torch sees. EVERY 4 takes one test of four. What the processes say goes into the
# folder LOGS. TESTS are files, as for pytest (tests/ops). racecheck wants kernels that were built for it
# (cmake.define.RAYLM_RACECHECK=ON).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
tool=${1:?"memcheck, racecheck, synccheck or initcheck"}
processes=${2:-4}
every=${3:-1}
logs=${4:-$(mktemp -d)}
tests=("${@:5}")
[ ${#tests[@]} -gt 0 ] || tests=(tests/ops)

# The references are small: with threads for all cores of a large host they take many times as long.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
# These two know where an allocation ends and what of it was written: each tensor is to be one. A graph cannot be
# captured then.
case "$tool" in memcheck | initcheck) export PYTORCH_NO_CUDA_MEMORY_CACHING=1 ;; esac
mkdir -p "$logs"
rm -f "$logs"/part-*
chosen="not cpu and not graph and not fallback and not avx and not generic"
# Of CUDA 13.0, racecheck ends with an internal error in 16-bit products of torch's library: these run none.
products="does_not_depend or bad_row and bfloat16 or same_bits or strides_of_many_rows or extremes"
# Under racecheck a sampler of thousands of rows takes longer than all else; tests of fewer rows take the same ways.
many="up_to_the_limit and not options0 or first_of_equal and 1000 or tokens_are_drawn"
[ "$tool" != racecheck ] || chosen="$chosen and (not (op_linear or op_gated_linear) or $products) and not ($many)"
all=$("$python" -c "import torch; print(*range(torch.cuda.device_count()), sep=',')")
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$all}"
"$python" -m pytest "${tests[@]}" -k "$chosen" --collect-only -q --no-header |
    grep :: | awk "NR % $every == 0" >"$logs/tests"
split -n "r/$processes" "$logs/tests" "$logs/part-"
running=()
for part in "$logs"/part-??; do
    CUDA_VISIBLE_DEVICES=${gpus[${#running[@]} % ${#gpus[@]}]} \
        compute-sanitizer --tool "$tool" --kernel-name kns=raylm --error-exitcode 9 --print-limit 5 \
        "$python" -m pytest -q -p no:cacheprovider --timeout 0 "@$part" >"$part.log" 2>&1 &
    running+=($!)
done
failed=0
for process in "${running[@]}"; do wait "$process" || failed=1; done
grep -hE "SUMMARY|^=+ .*(Invalid|Error|Race|hit)|^(FAILED|ERROR)|(passed|failed)" "$logs"/part-??.log | sort | uniq -c
echo "logs: $logs"
exit $failed
