#!/usr/bin/env bash
# Packs what a GPU machine without a Rust toolchain needs: the device suite, the benchmarks, the
# program, the library with its headers, the C, C++ and Python tests and examples, and the script
# that builds and runs them. Writes the folder device-bundle/.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

rm -rf device-bundle
mkdir device-bundle
cargo build --release --bin vbar --lib
# Cargo names the built files in its messages; their paths carry hashes.
cargo build --release --features device-tests --test device --bench faults --bench c_abi \
    --example engine --message-format=json-render-diagnostics |
    python3 -c '
import json, shutil, sys
wanted = {"device": "device", "faults": "faults", "c_abi": "c_abi", "engine": "engine-rust"}
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable"):
        name = wanted.get(message["target"]["name"])
        if name:
            shutil.copy(message["executable"], "device-bundle/" + name)
'
cp "$target/release/vbar" "$target/release/libvbar.so" scripts/device-run.sh device-bundle/
(cd device-bundle && strip device faults c_abi engine-rust vbar libvbar.so)
cp -r include examples python_shim device-bundle/
mkdir -p device-bundle/tests/abi
cp tests/abi/*.c tests/abi/*.h device-bundle/tests/abi/
cp -r tests/python device-bundle/tests/
find device-bundle -name __pycache__ -prune -exec rm -rf {} +
echo "device-bundle/: run device-run.sh in it on a machine with an NVIDIA driver, cc, c++," \
    "python3, torch and cupy"
