# Everything that a person does here by hand. CI does the same through .ci/run.

MODEL := demo-data/model.safetensors
VBAR  := $(or $(CARGO_TARGET_DIR),target)/release/vbar

.PHONY: help demo test fmt clippy doc bench header wheel device device-bundle tools clean-demo

help:
	@echo "make demo    stream a synthetic model of 1 GiB through a budget of 40 %, verified"
	@echo "make test    all tests, documentation included"
	@echo "make fmt     format the source"
	@echo "make clippy  lints, warnings denied"
	@echo "make doc     documentation, warnings denied"
	@echo "make bench   benchmarks, on a GPU where there is one"
	@echo "make header  write the C headers anew"
	@echo "make wheel   the Python wheel, in dist/, and its tests; needs pip"
	@echo "make device  the suite on a real GPU; fails where there is none"
	@echo "make device-bundle  packs that suite for machines without Rust"

# Says what is missing and what to do about it.
tools:
	@missing=0; \
	command -v cargo >/dev/null || { missing=1; \
	  echo "missing: cargo. Install Rust with rustup: https://rustup.rs" >&2; }; \
	command -v cc >/dev/null || { missing=1; \
	  echo "missing: cc, the linker that Rust calls. Debian, Ubuntu: apt-get install gcc libc6-dev" >&2; }; \
	command -v python3 >/dev/null || { missing=1; \
	  echo "missing: python3, which tests the Python package. Debian, Ubuntu: apt-get install python3" >&2; }; \
	exit $$missing

demo: tools
	cargo build --release
	@mkdir -p $(dir $(MODEL))
	$(VBAR) synth $(MODEL) --bytes 1G --seed 1
	$(VBAR) run $(MODEL) --budget 40% --passes 4 --verify

test: tools
	cargo test

fmt: tools
	cargo fmt

clippy: tools
	cargo clippy --all-targets --all-features -- -D warnings

doc: tools
	RUSTDOCFLAGS=-Dwarnings cargo doc --no-deps

bench: tools
	cargo bench

header: tools
	cargo run --quiet --example header

# Carries the library: whoever installs it needs no compiler.
wheel: tools
	rm -rf dist
	python3 -m pip wheel --no-deps --wheel-dir dist ./python_shim
	python3 tests/python/check_wheel.py dist/vbar_cuda-*.whl

# Needs a GPU and fails without one.
device: device-bundle
	device-bundle/device-run.sh

device-bundle: tools
	scripts/device-bundle.sh

clean-demo:
	rm -rf demo-data
