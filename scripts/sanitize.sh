#!/usr/bin/env bash
# Builds the tests and the program with a sanitizer of the compiler's, and runs what uses threads
# and raw memory: the unit tests, the tests of threads, the simulation, `vbar stress`.
#
#   scripts/sanitize.sh [thread|address]...      both, unless told
#
# `thread` finds accesses that nothing orders; the standard library is built with it too, since what
# is not instrumented (locks, channels) would look like no order at all. `address` finds accesses
# outside of what was allocated, or after it was freed, and at the end of each program what is left
# that nobody points to. Either stops at its first finding, with a status that is not 0.
#
# SECONDS_OF_STRESS=20   how long `vbar stress` runs, twice; and the simulation
# TOOLCHAIN=nightly      a nightly with the component rust-src
set -euo pipefail
cd "$(dirname "$0")/.."

toolchain=${TOOLCHAIN:-nightly}
seconds=${SECONDS_OF_STRESS:-20}

missing() {
    echo "missing: $1" >&2
    echo "Sanitizers are options of nightly compilers only (-Zsanitizer). Have one with" >&2
    echo "    rustup toolchain install $toolchain --profile minimal --component rust-src" >&2
    exit 1
}

command -v rustup >/dev/null || missing "rustup, which switches toolchains: https://rustup.rs"
command -v python3 >/dev/null || missing "python3, which reads what cargo says"
sysroot=$(rustc "+$toolchain" --print sysroot 2>/dev/null) || missing "the toolchain $toolchain"
host=$(rustc "+$toolchain" -vV | sed -n 's/^host: //p')
[ "$host" = x86_64-unknown-linux-gnu ] || [ "$host" = aarch64-unknown-linux-gnu ] ||
    missing "a host that has both sanitizers; this is $host"
[ -d "$sysroot/lib/rustlib/src/rust/library" ] || missing "the component rust-src of $toolchain"

run() {
    echo "== $* (after $SECONDS s)"
    "$@"
}

# Builds with the sanitizer $1; prints the path of what the target $2 became.
built() {
    local more=()
    if [ "$1" = thread ]; then more=(-Zbuild-std); fi
    # A target is named, so that build scripts and macros are built without it.
    RUSTFLAGS="-Zsanitizer=$1 -Cdebuginfo=line-tables-only" CARGO_INCREMENTAL=0 \
        cargo "+$toolchain" test --no-run "${more[@]}" --target "$host" \
        --target-dir "target/sanitize-$1" --lib --test it --test sim \
        --message-format=json-render-diagnostics |
        python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable"):
        target = message["target"]
        kind = "program" if "bin" in target["kind"] else target["name"]
        print(kind, message["executable"])'
}

check() {
    local sanitizer=$1 of path
    declare -A programs=()
    echo "== building with -Zsanitizer=$sanitizer (after $SECONDS s)"
    while read -r of path; do programs[$of]=$path; done < <(built "$sanitizer")
    for of in vbar it sim program; do
        [ -n "${programs[$of]:-}" ] || { echo "$of was not built" >&2; exit 1; }
    done
    local reasons=$PWD/scripts/sanitize
    export TSAN_OPTIONS="halt_on_error=1 exitcode=66 second_deadlock_stack=1"
    TSAN_OPTIONS+=" suppressions=$reasons/thread.supp"
    export ASAN_OPTIONS="detect_leaks=1 exitcode=66 detect_stack_use_after_return=1"
    export LSAN_OPTIONS="suppressions=$reasons/leak.supp print_suppressions=0"
    run "${programs[vbar]}" --quiet
    # Those with threads of their own, or of the library's. Tests that fork, fill their address
    # space or start other programs are for the ordinary build.
    run "${programs[it]}" --quiet threads:: scenario_13 streams:: allocations:: closing:: \
        closing_threads:: many:: registered:: waits:: engine:: engine_shared:: torch_storm:: \
        torch_streams:: engine_threads:: saves:: saves_ahead:: transfer:: bound_memory:: \
        torch_graphs:: torch_graphs_more:: torch_graphs_random::
    VBAR_SIM_SECONDS=$seconds run "${programs[sim]}" --quiet every_sequence
    run "${programs[program]}" stress --device sim --threads 8 --seconds "$seconds"
    run "${programs[program]}" stress --device sim --threads 8 --seconds "$seconds" --fail 0.02
}

if [ $# -eq 0 ]; then set -- thread address; fi
for sanitizer in "$@"; do
    case $sanitizer in
    thread | address) ;;
    *) echo "no such sanitizer: $sanitizer (thread, address)" >&2; exit 2 ;;
    esac
done
for sanitizer in "$@"; do
    check "$sanitizer"
done
echo "== nothing found by $* in $SECONDS s"
