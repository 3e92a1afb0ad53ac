#!/usr/bin/env bash
# Runs the device suite, the C, C++ and Python tests and examples, the benchmarks and a model larger
# than its budget on a real GPU. Fails, never skips, where there is none. Everything is printed as it
# comes; each step has a time limit.
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

# Compiles a program of the bundle: its name, the compiler with its standard, the sources.
build() {
    local name=$1 compiler=$2
    shift 2
    step 120 $compiler -Wall -Wextra -Werror -pedantic -O2 -Iinclude -o "built/$name" "$@" \
        -Lbuilt -lvbar -ldl -pthread -Wl,-rpath,"$PWD/built"
}

chmod +x device faults c_abi engine-rust vbar
mkdir -p built
# The program's loader looks for the library by the name of its ABI.
cp libvbar.so built/libvbar.so
cp libvbar.so built/libvbar.so.1
export VBAR_LIBRARY=$PWD/built/libvbar.so PYTHONPATH=$PWD/python_shim PYTHONDONTWRITEBYTECODE=1
if ! timeout 20 ./vbar doctor; then
    echo "== no usable GPU here: nothing was run" >&2
    exit 1
fi
step 400 ./device --test-threads 1
build gpu "cc -std=c11" tests/abi/gpu.c
build life "cc -std=c11" tests/abi/life.c
build threads "cc -std=c11" tests/abi/threads.c
build engine-c "cc -std=c11" examples/engine.c
build engine-cpp "c++ -std=c++17" examples/engine.cpp
step 60 built/gpu
step 60 env VBAR_TEST_DRIVER=cuda built/life /tmp
step 60 env VBAR_TEST_DRIVER=cuda built/threads /tmp
step 60 env VBAR_DRIVER=cuda built/engine-c
step 60 env VBAR_DRIVER=cuda built/engine-cpp
step 60 env VBAR_DRIVER=cuda ./engine-rust
step 200 python3 -u tests/python/test_gpu.py
step 60 env VBAR_BENCH_LIBRARY="$VBAR_LIBRARY" ./c_abi
step 120 ./faults
step 300 ./vbar synth "$model" --bytes "$model_bytes" --seed 7
step 300 ./vbar run "$model" --budget "$budget" --passes 3 --device cuda --verify
step 60 ./vbar stress --seconds 20 --seed 1 --threads 4 --device cuda
rm -f "$model"
[ "$failed" -eq 0 ] && echo "== all passed" || echo "== something failed"
exit "$failed"
