#!/usr/bin/env bash
# Runs on a real GPU: the device suite, the C, C++ and Python tests and examples, the benchmarks, and
# a model larger than its budget. Fails, never skips, where there is none. Everything is printed as
# it comes; each step has a time limit.
#
#   MODEL_BYTES=16G BUDGET=8G MODEL=/tmp/vbar-model.safetensors ./device-run.sh [PART...]
#
# The parts are suite, programs, python, torch, examples, bench, stream and model; without a name,
# all of them. One more has to be named, since it needs two GPUs and fails with fewer: distributed.
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
    return "$code"
}

# Compiles a program of the bundle, its sources and arguments apart by `--`, and runs it:
# NAME LIMIT SOURCE... -- ARGUMENT...
compiled() {
    local name=$1 limit=$2 sources=()
    shift 2
    while [ "$1" != -- ]; do
        sources+=("$1")
        shift
    done
    shift
    local compiler=(gcc -std=c11)
    case ${sources[0]} in *.cpp) compiler=(g++ -std=c++17) ;; esac
    step 120 "${compiler[@]}" -O2 -Wall -Wextra -Werror -pedantic -pthread -I include \
        "${sources[@]}" -o "built/$name" -Wl,--as-needed -L lib -lvbar -ldl \
        -Wl,-rpath,"$PWD/lib" && step "$limit" "built/$name" "$@"
}

suite() {
    step 400 ./device --test-threads 1
}

# The C tests that make sense on a real device, and the engines in three languages: each on a model
# of its own, and on one of 1 GiB in a budget of 300 MiB.
programs() {
    mkdir -p built
    local folder test language
    folder=$(mktemp -d)
    step 100 ./vbar synth "$folder/model.safetensors" --bytes 1G --seed 7
    step 100 ./vbar synth "$folder/small.safetensors" --bytes 1M --seed 7
    export VBAR_TEST_DRIVER=cuda VBAR_DRIVER=cuda
    compiled hostile 60 tests/abi/hostile*.c -- "$folder"
    for test in gpu sizes life threads files log process opening signals reset; do
        compiled "$test" 120 "tests/abi/$test.c" -- "$folder"
    done
    compiled reload 60 tests/abi/reload.c -- lib/libvbar.so
    # The library's own thread beside the program's.
    VBAR_TEST_THREADS=1 step 60 built/threads "$folder"
    VBAR_TEST_THREADS=1 step 120 built/process "$folder"
    VBAR_TEST_THREADS=1 step 60 built/signals "$folder"
    VBAR_TEST_THREADS=1 step 60 built/reload lib/libvbar.so
    for language in c cpp; do
        compiled "engine-$language" 60 "examples/engine.$language" --
        step 120 "built/engine-$language" "$folder/model.safetensors" 300
    done
    step 60 ./engine-rust
    step 120 ./engine-rust "$folder/model.safetensors" 300
    compiled smallest-c 60 examples/smallest.c -- "$folder/small.safetensors"
    step 60 ./smallest-rust "$folder/small.safetensors"
    step 60 ./own-weights-rust
    unset VBAR_TEST_DRIVER VBAR_DRIVER
    rm -rf "$folder"
}

# With the torch and CuPy that are there.
python() {
    step 200 python3 -u tests/python/test_gpu.py
}

# PyTorch on vbar's allocator, and modules on model files. Some of it compares with PyTorch's own, which takes its time.
torch() {
    step 560 python3 -u tests/python/test_torch_gpu.py
    step 560 python3 -u tests/python/test_torch_stream_gpu.py
    step 300 python3 -u tests/python/test_torch_memory_gpu.py
    step 200 python3 -u benches/torch_replay.py --tight benches/torch_traces/traces/*.gz
}

# Models of gigabytes in half of their bytes; what they print is compared with ordinary modules.
examples() {
    step 120 python3 -u examples/torch_generate.py
    step 120 python3 -u examples/torch_generate.py --install
    step 120 python3 -u examples/torch_sample.py
}

# NCCL between two processes and within one, a model on two GPUs.
distributed() {
    step 560 python3 -u tests/python/test_torch_distributed_gpu.py
}

bench() {
    step 60 env VBAR_BENCH_LIBRARY="$VBAR_LIBRARY" ./c_abi
    step 120 ./faults
}

# A model of 16 GiB through budgets of parts of it, beside plain resident tensors: STREAM has the
# options of benches/stream.py, TORCH_STREAM those of benches/torch_stream.py.
stream() {
    # shellcheck disable=SC2086
    step 560 python3 -u benches/stream.py ${STREAM:-}
    step 200 python3 -u benches/torch_stream.py ${TORCH_STREAM:---quick}
}

model() {
    step 300 ./vbar synth "$model" --bytes "$model_bytes" --seed 7
    step 300 ./vbar run "$model" --budget "$budget" --passes 3 --device cuda --verify
    step 60 ./vbar stress --seconds 20 --seed 1 --threads 4 --device cuda
    rm -f "$model"
}

parts=("$@")
[ "${#parts[@]}" -gt 0 ] || parts=(suite programs python torch examples bench stream model)
for part in "${parts[@]}"; do
    case $part in
    suite | programs | python | torch | examples | distributed | bench | stream | model) ;;
    *)
        echo "== there is no part $part: suite, programs, python, torch, examples, distributed," \
            "bench, stream, model" >&2
        exit 2
        ;;
    esac
done
chmod +x device faults c_abi engine-rust smallest-rust own-weights-rust vbar
export VBAR_LIBRARY=$PWD/lib/libvbar.so PYTHONPATH=$PWD/python_shim PYTHONDONTWRITEBYTECODE=1
if ! timeout 20 ./vbar doctor; then
    echo "== no usable GPU here: nothing was run" >&2
    exit 1
fi
for part in "${parts[@]}"; do "$part"; done
[ "$failed" -eq 0 ] && echo "== all passed" || echo "== something failed"
exit "$failed"
