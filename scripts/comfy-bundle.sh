#!/usr/bin/env bash
# Puts into comfy-bundle/ what benches/comfy.py compares on a machine without network: the package of
# ComfyUI, its small dependencies, and the original allocator. A few MB; git ignores the folder.
#
#   scripts/comfy-bundle.sh REPOSITORY [COMMIT]
#   python3 benches/comfy.py comfy-bundle/tree --original comfy-bundle/original --seconds 480
#
# REPOSITORY is a clone of a ComfyUI 0.33, bare or not. Of its commit, HEAD unless named, Python and
# JSON files are taken, but no tokenizers, which are large: text encoders are not run.
# The packages come from the index that pip is set to. PYTHON_VERSION (3.12) and PLATFORM
# (manylinux_2_28_x86_64) are those of the other machine, which has PyTorch, transformers and numpy.
set -euo pipefail
repository=${1:?says where a clone of ComfyUI is}
commit=${2:-HEAD}
repository=$(cd "$repository" && pwd)
cd "$(dirname "$0")/.."
bundle=${COMFY_BUNDLE:-comfy-bundle}
version=${PYTHON_VERSION:-3.12}
platform=${PLATFORM:-manylinux_2_28_x86_64}
pip=${PIP:-python3 -m pip}

git=(git -c safe.directory="$repository" -C "$repository")
rm -rf "$bundle"
mkdir -p "$bundle"/{tree,site,original,wheels}
mapfile -t names < <("${git[@]}" ls-tree -r --name-only "$commit" -- comfy comfyui_version.py \
    cuda_malloc.py node_helpers.py | grep -E '\.(py|json)$' | grep -Ev 'tokenizer.*\.json$')
[ "${#names[@]}" -gt 0 ] || { echo "no ComfyUI is in $repository at $commit" >&2; exit 1; }
"${git[@]}" archive "$commit" -- "${names[@]}" | tar -x -C "$bundle/tree"

# What is used of these is all that is asked for: no dependencies, which the machine has.
# shellcheck disable=SC2086
$pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "$version" --implementation cp --platform "$platform" \
    --platform manylinux_2_17_x86_64 --dest "$bundle/wheels" \
    comfy-kitchen==0.2.31 torchsde==0.2.6 trampoline==0.1.2 einops==0.8.2 psutil==7.2.2
# shellcheck disable=SC2086
$pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "$version" --implementation cp --platform "$platform" \
    --platform manylinux_2_17_x86_64 --dest "$bundle/wheels/original" comfy-aimdo==0.4.13
python3 - "$bundle" <<'PYTHON'
import pathlib, sys, zipfile

bundle = pathlib.Path(sys.argv[1])
for wheels, target in (("wheels", "site"), ("wheels/original", "original")):
    for wheel in sorted((bundle / wheels).glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                # Its own kernels are 230 MB; without them it uses PyTorch's.
                if not (name.startswith("comfy_kitchen/") and name.endswith(".so")):
                    archive.extract(name, bundle / target)
PYTHON
rm -r "$bundle/wheels"
du -sh "$bundle" | cut -f 1
