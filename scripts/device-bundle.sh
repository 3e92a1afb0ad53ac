#!/usr/bin/env bash
# Packs what a GPU machine without a Rust toolchain needs: the device suite, the benchmark and the
# program, stripped, with the script that runs them. Writes the folder device-bundle/.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf device-bundle
mkdir device-bundle
cargo build --release --bin vbar
# Cargo names the built files in its messages; their paths carry hashes.
cargo build --release --features device-tests --test device --bench faults \
    --message-format=json-render-diagnostics |
    python3 -c '
import json, shutil, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable"):
        name = message["target"]["name"]
        if name in ("device", "faults"):
            shutil.copy(message["executable"], "device-bundle/" + name)
'
cp target/release/vbar scripts/device-run.sh device-bundle/
strip device-bundle/device device-bundle/faults device-bundle/vbar
echo "device-bundle/: run device-run.sh in it on a machine with an NVIDIA driver"
