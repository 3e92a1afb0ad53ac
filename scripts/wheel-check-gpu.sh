#!/usr/bin/env bash
# The wheel as a user gets it, beside PyTorch on a GPU: installed with no index into an environment
# that was made for it, then the programs of the README on a model of 1 GiB. Nothing is taken from
# the repository but the examples; fails where there is no GPU, and leaves nothing behind.
#
#   scripts/wheel-check-gpu.sh dist/vbar_cuda-*.whl
#
# PYTHON is the interpreter whose PyTorch is used, python3 if it is not given.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 WHEEL" >&2; exit 2; }
wheel=$(realpath "$1")
examples=$(realpath "$(dirname "$0")/../examples")
beside=${PYTHON:-python3}
# Whatever names another library or package.
unset PYTHONPATH VBAR_LIBRARY VBAR_DRIVER
export PYTHONDONTWRITEBYTECODE=1

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$beside" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'
"$beside" -m venv --system-site-packages --without-pip new
python=$folder/new/bin/python
"$beside" -m pip --python "$python" install --quiet --no-index --no-deps "$wheel"
# The interpreter may be one of an environment itself, which the new one would not see.
"$beside" -c 'import sysconfig as s; print(*map(s.get_path, ("purelib", "platlib")), sep="\n")' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"

"$python" - "$folder/new" <<'END'
import sys
import torch
import vbar
print("vbar", vbar.version(), "of", vbar.__file__, "with torch", torch.__version__)
assert vbar.__file__.startswith(sys.argv[1]), "that is another installation"
vbar.load()
with open("/proc/self/maps") as maps:
    libraries = {line.split()[-1] for line in maps if "libvbar" in line}
assert len(libraries) == 1 and libraries.pop().startswith(sys.argv[1]), libraries
END
PYTHONPATH=$examples "$python" - "$folder/model.safetensors" <<'END'
import sys
import torch
import torch_weights
layers = torch.nn.Sequential(
    *(torch.nn.Linear(8192, 8192, dtype=torch.bfloat16, device="meta") for _ in range(8))
)
nbytes, seconds = torch_weights.write(sys.argv[1], layers)
print(f"a model of {nbytes} bytes in {seconds:.1f} s")
END
for program in smallest torch_tensors; do
    echo "-- $program.py"
    "$python" "$examples/$program.py" "$folder/model.safetensors"
done
if "$python" -c 'import transformers' 2>/dev/null; then
    echo "-- torch_generate.py"
    "$python" "$examples/torch_generate.py" --layers 4 --tokens 16
fi
echo "-- the wheel works beside PyTorch"
