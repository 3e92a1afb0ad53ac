#!/usr/bin/env bash
# Runs the device suite, the benchmarks and a model larger than its budget on a real GPU. Fails,
# never skips, where there is none. Everything is printed as it comes; each step has a time limit.
#
#   MODEL_BYTES=16G BUDGET=8G MODEL=/tmp/vbar-model.safetensors ./device-run.sh
set -uo pipefail
cd "$(dirname "$0")"
model_bytes=${MODEL_BYTES:-16G}
budget=${BUDGET:-8G}
model=${MODEL:-/tmp/vbar-model.safetensors}
failed=0

step() {
    local limit=$1
    shift
    echo "== $*"
    timeout "$limit" "$@"
    local code=$?
    if [ "$code" -ne 0 ]; then
        echo "== FAILED with $code: $*"
        failed=1
    fi
}

chmod +x device faults vbar
if ! timeout 20 ./vbar doctor; then
    echo "== no usable GPU here: nothing was run" >&2
    exit 1
fi
step 400 ./device --test-threads 1
step 120 ./faults
step 300 ./vbar synth "$model" --bytes "$model_bytes" --seed 7
step 300 ./vbar run "$model" --budget "$budget" --passes 3 --device cuda --verify
step 60 ./vbar stress --seconds 20 --seed 1 --threads 4 --device cuda
rm -f "$model"
[ "$failed" -eq 0 ] && echo "== all passed" || echo "== something failed"
exit "$failed"
