#!/usr/bin/env bash
# Runs on a real GPU: the device suite, the C, C++ and Python tests and examples, the benchmarks, and
# a model larger than its budget. Fails, never skips, where there is none. Everything is printed as
# it comes; each step has a time limit.
#
#   MODEL_BYTES=16G BUDGET=8G MODEL=/tmp/vbar-model.safetensors ./device-run.sh [PART...]
#
# The parts are suite, programs, python, torch, examples, bench, stream and model; without a name,
# all of them. Others have to be named. `distributed` needs two GPUs and fails with fewer. `sanitizer`
# needs compute-sanitizer and takes its time, SANITIZER_TOOLS=memcheck runs one of its two tools. `comfy`
# needs what scripts/comfy-bundle.sh makes, at COMFY_BUNDLE (../comfy-bundle), or a ComfyUI 0.33 at
# COMFY_TREE with what it imports and the folder of the original allocator as COMFY_ORIGINAL.
#
# Where a command may take ten minutes and no more: `due` runs what has to pass on one GPU within
# DUE_SECONDS, several parts at once, prints a line for each, and packs what they said into
# $OUT/due.tar.gz. `soak` starts benches/soak.py for SOAK_SECONDS, which goes on when this script
# has ended; `soak-poll` waits SOAK_POLL_SECONDS for it at most, judges what there is, and copies
# it to $OUT. SOAK has more of its options. Both in one go:
#
#   DUE_SECONDS=440 SOAK_START_SECONDS=40 OUT=/tmp/out ./device-run.sh due soak
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
    # Below another time limit all of its processes have to be in one group.
    timeout ${DUE_STEP:+--foreground} "$limit" "$@"
    local code=$?
    if [ "$code" -ne 0 ]; then
        echo "== FAILED with $code: $*"
        failed=1
    fi
    return "$code"
}

# What programs run under, if anything.
under=()

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
        -Wl,-rpath,"$PWD/lib" && step "$limit" ${under[@]+"${under[@]}"} "built/$name" "$@"
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

# The device suite, the C programs and the engines under the tools of compute-sanitizer: reads and
# writes of kernels and copies outside of what is mapped, reads of what nobody wrote. Everything is
# slower by an order of magnitude, and launches do not return before their kernel runs; so these
# are left out of the suite:
#   the_door, a_wait_for, other_programs   check how long something takes, or that nothing waits
#   a_handle_is, five_thousand             tens of thousands of calls and no kernel
sanitizer() {
    local tool test folder
    folder=$(mktemp -d)
    mkdir -p built
    export VBAR_TEST_DRIVER=cuda VBAR_DRIVER=cuda
    step 60 ./vbar synth "$folder/model.safetensors" --bytes 128M --seed 7
    for tool in ${SANITIZER_TOOLS:-memcheck initcheck}; do
        under=(./sanitized.sh "$tool")
        step 240 "${under[@]}" ./device --test-threads 1 --skip the_door --skip a_wait_for \
            --skip other_programs --skip a_handle_is --skip five_thousand
        compiled hostile 60 tests/abi/hostile*.c -- "$folder"
        for test in gpu life threads files; do
            compiled "$test" 90 "tests/abi/$test.c" -- "$folder"
        done
        compiled engine-c 60 examples/engine.c -- "$folder/model.safetensors" 64
        compiled engine-cpp 60 examples/engine.cpp -- "$folder/model.safetensors" 64
        step 60 "${under[@]}" ./engine-rust "$folder/model.safetensors" 64
    done
    under=()
    unset VBAR_TEST_DRIVER VBAR_DRIVER
    rm -rf "$folder"
}

# With the torch and CuPy that are there.
python() {
    step 200 python3 -u tests/python/test_gpu.py
}

# PyTorch on vbar's allocator, modules on model files, and the package that ComfyUI imports. Some of it
# compares with PyTorch's own, which takes its time.
torch() {
    step 560 python3 -u tests/python/test_torch_gpu.py
    step 560 python3 -u tests/python/test_torch_stream_gpu.py
    step 300 python3 -u tests/python/test_torch_memory_gpu.py
    step 300 python3 -u tests/python/test_comfy_gpu.py
    step 100 python3 -u tests/python/test_comfy_graph_gpu.py
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

# The wheel in an environment of its own, beside PyTorch.
wheel() {
    if [ ! -d dist ]; then
        echo "== no wheel is in the bundle: make wheel, then scripts/device-bundle.sh" >&2
        failed=1
        return
    fi
    step 120 bash scripts/wheel-check-gpu.sh dist/vbar_cuda-*.whl
}

# ComfyUI on vbar beside the original allocator and none: COMFY has more options of benches/comfy.py,
# as `--cases flux --caps 4`. Checkpoints stay in COMFY_FOLDER, for the next part on this machine.
comfy() {
    local bundle=${COMFY_BUNDLE:-../comfy-bundle} original
    local tree=${COMFY_TREE:-$bundle/tree}
    original=${COMFY_ORIGINAL-$bundle/original}
    if [ ! -d "$tree/comfy" ]; then
        echo "== no ComfyUI is in $tree: scripts/comfy-bundle.sh puts one there" >&2
        failed=1
        return
    fi
    # shellcheck disable=SC2086
    step 590 python3 -u benches/comfy.py "$tree" ${original:+--original "$original"} \
        --folder "${COMFY_FOLDER:-/tmp/vbar-comfy}" --seconds "${COMFY_SECONDS:-480}" \
        --json "${OUT:-.}/comfy.jsonl" ${COMFY:-}
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

# A part of `due`, or a command: what it prints goes into a file, and what became of it is a line:
# NAME LIMIT COMMAND...
due_step() {
    local name=$1 limit=$2 began=$SECONDS left=$((due_until - SECONDS))
    shift 2
    if [ "$left" -lt 15 ]; then
        echo "-- $name: left out, there is no time" | tee -a "$logs/failed"
        return
    fi
    [ "$limit" -le "$left" ] || limit=$left
    DUE_STEP=1 timeout -k 5 "$limit" "$@" >"$logs/$name.log" 2>&1
    local code=$?
    local line="-- $name: $((SECONDS - began)) s, ended with $code"
    [ "$code" -ne 124 ] || line="$line: its time was over"
    echo "$line"
    [ "$code" -eq 0 ] || echo "$line" >>"$logs/failed"
}

# Classes of a file of tests: NAME LIMIT FILE CLASS...
due_tests() {
    local name=$1 limit=$2 file=$3
    shift 3
    due_step "$name" "$limit" python3 -u "tests/python/$file" "$@"
}

due_part() {
    due_step "$1" "$2" "./${0##*/}" "$1"
}

due() {
    logs=$(mktemp -d)
    due_until=$((SECONDS + ${DUE_SECONDS:-500}))
    # None of these wants the whole card, or looks at the clock. Limits of classes of tests are
    # twice what they took beside four others.
    due_tests torch-compiled 400 test_torch_stream_gpu.py Compiled &
    due_tests torch-stream 360 test_torch_stream_gpu.py Stream &
    due_tests torch-transformers 280 test_torch_stream_gpu.py Transformers &
    {
        due_part programs 200
        due_part python 120
        due_tests torch-graphs 180 test_torch_gpu.py Graphs Installing
    } &
    {
        due_tests torch-streams 240 test_torch_gpu.py Ends Streams Operators
        due_tests torch-ends 120 test_torch_memory_gpu.py Ends Temporaries
        due_tests comfy-graph 90 test_comfy_graph_gpu.py
        if [ -d dist ]; then due_part wheel 150; fi
    } &
    wait
    # These fill it, compare what is free, or measure; those that stand for most come first.
    due_part suite 200
    due_step stream-bench 120 \
        python3 -u benches/stream.py --workloads equal --budgets 25,50 --rounds 3
    due_tests torch-requests 230 test_torch_gpu.py Requests Statistics Pools Memory Speed
    due_tests torch-books 60 test_torch_memory_gpu.py Books
    due_tests torch-large 120 test_torch_memory_gpu.py Large
    due_tests comfy 240 test_comfy_gpu.py
    due_step torch-stream-bench 120 python3 -u benches/torch_stream.py --quick
    due_step replay 120 python3 -u benches/torch_replay.py benches/torch_traces/traces/*.gz
    # Slow by its nature, so that it takes what is left.
    if declare -F sanitizer >/dev/null; then due_part sanitizer 300; fi
    if [ -s "$logs/failed" ]; then
        failed=1
        # The ends of what failed: the rest is in the archive.
        sed -n 's/^-- \([^:]*\): .*ended.*/\1/p' "$logs/failed" | while read -r name; do
            echo "== the end of $name"
            tail -n 15 "$logs/$name.log"
        done
    fi
    tar -czf "${OUT:-.}/due.tar.gz" -C "$logs" . && rm -r "$logs"
}

soak_folder=${SOAK_FOLDER:-/tmp/vbar-soak}

# Whether it is there and no zombie.
soak_runs() {
    [ -e "$soak_folder/pid" ] &&
        grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$(cat "$soak_folder/pid")/status"
}

soak() {
    if soak_runs; then
        echo "== a soak is running already: process $(cat "$soak_folder/pid")"
        failed=1
        return
    fi
    rm -rf "$soak_folder"
    mkdir -p "$soak_folder"
    # In a session of its own: what ends this script does not end it.
    # shellcheck disable=SC2086
    setsid nohup python3 -u benches/soak.py --seconds "${SOAK_SECONDS:-900}" \
        --jsonl "$soak_folder/soak.jsonl" --json "$soak_folder/verdict.json" \
        --svg "$soak_folder/soak.svg" ${SOAK:-} >"$soak_folder/soak.log" 2>&1 </dev/null &
    echo $! >"$soak_folder/pid"
    # Whatever is missing shows before the first sample, which takes a minute or two.
    for ((waited = 0; waited < ${SOAK_START_SECONDS:-400}; waited++)); do
        if grep -qs '"sample"' "$soak_folder/soak.jsonl"; then
            echo "== a soak is running: process $(cat "$soak_folder/pid"), $soak_folder"
            return
        fi
        soak_runs || break
        sleep 1
    done
    if soak_runs; then
        echo "== a soak has started, and has no sample yet: process $(cat "$soak_folder/pid")"
        return
    fi
    echo "== FAILED: the soak has no sample"
    tail -n 30 "$soak_folder/soak.log"
    failed=1
}

soak-poll() {
    for ((waited = 0; waited < ${SOAK_POLL_SECONDS:-0}; waited++)); do
        soak_runs || break
        sleep 1
    done
    local running=no
    if soak_runs; then running=yes; fi
    tail -n 5 "$soak_folder/soak.log"
    python3 benches/soak.py --report "$soak_folder/soak.jsonl" --json "$soak_folder/verdict.json" \
        --svg "$soak_folder/soak.svg"
    local code=$?
    [ -z "${OUT:-}" ] || cp "$soak_folder"/soak.{jsonl,svg,log} "$soak_folder/verdict.json" "$OUT"
    # Too few samples while it runs are no failure.
    if [ "$code" -ne 0 ] && ! { [ "$code" -eq 3 ] && [ "$running" = yes ]; }; then failed=1; fi
}

parts=("$@")
[ "${#parts[@]}" -gt 0 ] || parts=(suite programs python torch examples bench stream model)
for part in "${parts[@]}"; do
    case $part in
    suite | programs | python | torch | examples | distributed | sanitizer | comfy | bench | stream | model) ;;
    wheel | due | soak | soak-poll) ;;
    *)
        echo "== there is no part $part: suite, programs, python, torch, examples, distributed," \
            "sanitizer, comfy, bench, stream, model, wheel, due, soak, soak-poll" >&2
        exit 2
        ;;
    esac
done
[ -n "${DUE_STEP:-}" ] ||
    chmod +x "${0##*/}" device faults c_abi engine-rust smallest-rust own-weights-rust vbar
export VBAR_LIBRARY=$PWD/lib/libvbar.so PYTHONPATH=$PWD/python_shim PYTHONDONTWRITEBYTECODE=1
# A part of another run of this script was preceded by that. A soak that is only looked at may have
# all of the device's memory, where nobody gets a context to try it with.
if [ -z "${DUE_STEP:-}" ] && [ "${parts[*]}" != soak-poll ] && ! timeout 20 ./vbar doctor; then
    echo "== no usable GPU here: nothing was run" >&2
    exit 1
fi
for part in "${parts[@]}"; do "$part"; done
[ "$failed" -eq 0 ] && echo "== all passed" || echo "== something failed"
exit "$failed"
