"""Makes the weights of a model resident one by one, in 4 GiB of the device or less."""

import sys

import vbar

if len(sys.argv) != 2:
    sys.exit("usage: smallest.py MODEL")
with vbar.Device("auto", budget="4G") as device, device.open_model(sys.argv[1]) as model:
    # Every tensor has an address that never changes. Nothing is in device memory yet.
    for name in model:
        with model.fault(name) as weight:
            if weight:
                # Resident, pinned, and valid for work on the stream: launch it here, with
                # torch.from_dlpack(weight.view()) or the address. After the block the bytes stay
                # until that work is done, and not longer than they must.
                print(f"{name}: {weight.nbytes} bytes at {weight.address:#x}")
            else:
                # Not resident, and the reason says why: use the host's copy.
                print(f"{name}: offloaded, {weight.reason}")
