#!/usr/bin/env bash
# Runs a program under a tool of compute-sanitizer, which comes with CUDA's toolkit:
#
#   sanitized.sh memcheck|initcheck PROGRAM ARGUMENT...
#
# The status is the program's, 86 when the tool has found something, 87 when it has not looked, and
# 127 where there is none. COMPUTE_SANITIZER says where it is, if it is not on the path.
set -uo pipefail
tool=$1
shift
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer)}
for place in /usr/local/cuda/bin /usr/local/cuda-*/bin; do
    [ -n "$sanitizer" ] || [ ! -x "$place/compute-sanitizer" ] || sanitizer=$place/compute-sanitizer
done
if [ -z "$sanitizer" ]; then
    echo "compute-sanitizer is missing: it comes with CUDA's toolkit; COMPUTE_SANITIZER says where" >&2
    exit 127
fi

options=(--tool "$tool" --error-exitcode 86 --target-processes all --print-limit 20)
case $tool in
memcheck)
    # Calls that fail are no errors: the tests ask for what is refused (no memory, streams that are
    # gone) and the library asks what is not ready; both look at the code. What the memory accesses
    # of kernels, copies and memsets do wrong is told all the same.
    options+=(--report-api-errors no)
    # Leaks are looked for by the tests themselves. At exit the library frees nothing, on purpose:
    # the driver may be gone by then.
    options+=(--leak-check no)
    ;;
initcheck)
    # Without --track-unused-memory, which takes no value: memory that nobody reads is not an error,
    # a page has more bytes than its tensors.
    ;;
*)
    echo "there is no tool $tool here: memcheck or initcheck" >&2
    exit 2
    ;;
esac

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$sanitizer" "${options[@]}" "$@" 2>&1 | tee "$log"
code=${PIPESTATUS[0]}
if grep -q 'ERROR SUMMARY: [1-9]' "$log" && [ "$code" -eq 0 ]; then
    code=86
fi
# A program that never used the device, or a tool that could not attach, has found nothing either.
if [ "$code" -eq 0 ] && ! grep -q 'ERROR SUMMARY: 0 errors' "$log"; then
    echo "$tool did not look at $1" >&2
    code=87
fi
exit "$code"
