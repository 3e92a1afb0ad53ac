#!/usr/bin/env bash
# Installs as users do, with the release profile, into a folder of its own, and builds and runs the
# smallest program there by pkg-config, against the shared library and the archive. `make
# test-install` does more, with the profile of the tests.
set -euo pipefail
cd "$(dirname "$0")/.."

tree=$(mktemp -d)
make install PREFIX="$tree"
"$tree/bin/vbar" synth "$tree/model.safetensors" --bytes 64M --seed 1
for library in -lvbar -l:libvbar.a; do
    flags=$(PKG_CONFIG_PATH="$tree/lib/pkgconfig" pkg-config --static --cflags --libs vbar)
    # shellcheck disable=SC2086
    cc -std=c11 examples/smallest.c -o "$tree/smallest" ${flags/-lvbar/$library}
    LD_LIBRARY_PATH="$tree/lib" VBAR_DRIVER=sim "$tree/smallest" "$tree/model.safetensors" |
        tail -n 1
done
make uninstall PREFIX="$tree"
rm -r "$tree"
