#!/usr/bin/env bash
# Packs what a GPU machine without a Rust toolchain needs: the device suite, the benchmarks, the
# program, the library with its headers, the C, C++ and Python tests and examples, and the script
# that builds and runs them. Writes the folder device-bundle/, laid out as the repository is.
set -euo pipefail
cd "$(dirname "$0")/.."
bundle=device-bundle
target=${CARGO_TARGET_DIR:-target}

rm -rf "$bundle"
mkdir "$bundle"
cargo build --release --bin vbar
# Cargo names the built files in its messages; their paths carry hashes.
cargo build --release --features device-tests --test device --bench faults --bench c_abi \
    --example engine --example smallest --example own_weights \
    --message-format=json-render-diagnostics |
    python3 -c '
import json, shutil, sys
wanted = {"device": "device", "faults": "faults", "c_abi": "c_abi", "engine": "engine-rust",
          "smallest": "smallest-rust", "own_weights": "own-weights-rust"}
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable"):
        name = wanted.get(message["target"]["name"])
        if name:
            shutil.copy(message["executable"], sys.argv[1] + "/" + name)
' "$bundle"
cp "$target/release/vbar" scripts/device-run.sh scripts/sanitized.sh "$bundle"
# The library as it is installed: built as nothing else, it is optimised as a whole. Last, since
# the builds before leave another in its place.
cargo rustc --release --lib --crate-type cdylib

# The library under the names that linkers and loaders look for.
abi=$(sed -n 's/^#define VBAR_ABI_VERSION //p' include/vbar.h)
mkdir "$bundle/lib"
cp "$target/release/libvbar.so" "$bundle/lib/libvbar.so.$abi"
cp "$target/release/libvbar.so" "$bundle/lib/libvbar.so"
(cd "$bundle" && strip device faults c_abi engine-rust smallest-rust own-weights-rust vbar \
    lib/libvbar.so*)

mkdir -p "$bundle"/{examples,benches/torch_traces,tests/abi}
cp benches/*.py benches/soak.c benches/soak.h "$bundle/benches"
cp -r benches/torch_traces/traces "$bundle/benches/torch_traces"
cp -r include python_shim "$bundle"
cp -r tests/python "$bundle/tests"
cp examples/*.c examples/*.cpp examples/*.py "$bundle/examples"
cp tests/abi/*.c tests/abi/*.h "$bundle/tests/abi"
# The wheel of `make wheel`, where there is one.
if compgen -G "dist/vbar_cuda-*.whl" >/dev/null; then
    mkdir "$bundle"/{dist,scripts}
    cp dist/vbar_cuda-*.whl "$bundle/dist"
    cp scripts/wheel-check-gpu.sh "$bundle/scripts"
fi
# What the package's own builds and runs leave beside the sources.
find "$bundle" -name __pycache__ -prune -exec rm -r {} +
rm -f "$bundle"/python_shim/vbar/*.so
du -sh "$bundle"
echo "$bundle/: run device-run.sh in it on a machine with an NVIDIA driver, gcc, g++, python3," \
    "torch and cupy"
