# Everything that a person does here by hand. CI does the same through .ci/run.

MODEL  := demo-data/model.safetensors
FOLDER := $(abspath $(or $(CARGO_TARGET_DIR),target))
VBAR   := $(FOLDER)/release/vbar

# Where `make install` puts what. DESTDIR goes before all of them and into no file.
DESTDIR    ?=
PREFIX     ?= /usr/local
BINDIR     ?= $(PREFIX)/bin
LIBDIR     ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
DATADIR    ?= $(PREFIX)/share
MANDIR     ?= $(DATADIR)/man

# The profile of cargo that is installed; what is built of it, ready to be copied.
PROFILE ?= release
BUILT   := $(FOLDER)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
STAGED  := $(BUILT)/staged
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
ABI     := $(shell sed -n 's/^\#define VBAR_ABI_VERSION //p' include/vbar.h)

# Recipes name files below FOLDER, and make has no way to quote them.
SPACELESS := demo soak loom build install install-strip uninstall test-install test-install-release
ifneq ($(words $(FOLDER)),1)
ifneq ($(filter $(SPACELESS),$(MAKECMDGOALS)),)
$(error the path $(FOLDER) has a space, which make cannot build in: move the checkout, or set CARGO_TARGET_DIR)
endif
endif

# How long `make soak` lets real threads work with a driver that fails, and for how many operations
# with one that does not.
STRESS_SECONDS ?= 20
STRESS_OPERATIONS ?= 1000000

# What `make fuzz` looks at, and how long at each.
FUZZ_TARGETS := header index options system calls

.PHONY: help demo test soak loom sanitize memcheck fuzz test-install test-install-release fmt clippy doc \
        bench header wheel device device-bundle device-sanitizer tools \
        build install install-strip uninstall clean-demo

help:
	@echo "make demo    stream a synthetic model of 1 GiB through a budget of 40 %, verified"
	@echo "make test    all tests, documentation included; needs cargo, cc, make and python3"
	@echo "make soak SECONDS=600  the simulation with fresh seeds for so long, then real threads"
	@echo "make fuzz SECONDS=600 TARGET=calls  libFuzzer looks for hostile input; all targets without one;"
	@echo "             needs a nightly toolchain and cargo-fuzz"
	@echo "make loom    lock-free and hand-over code in every order of a few interruptions"
	@echo "make sanitize  ThreadSanitizer and AddressSanitizer; needs a nightly Rust with rust-src"
	@echo "make memcheck  valgrind on every program in C and C++; needs c++ and valgrind"
	@echo "make test-install  the test of make install; needs c++, pkg-config, cmake and valgrind too"
	@echo "make fmt     format the source"
	@echo "make clippy  lints, warnings denied"
	@echo "make doc     documentation, warnings denied"
	@echo "make bench   benchmarks, on a GPU where there is one"
	@echo "make header  write the C headers anew"
	@echo "make build   what make install copies: library, archive, program, manual, completions"
	@echo "make install PREFIX=/usr/local DESTDIR= LIBDIR=...  builds what is not built, and copies"
	@echo "make install-strip  the same without debugging information"
	@echo "make uninstall PREFIX=... removes what make install copied"
	@echo "make wheel   the Python wheel, in dist/, and its tests; needs pip"
	@echo "make device  the suite on a real GPU; fails where there is none"
	@echo "make device-sanitizer  the same under compute-sanitizer, which comes with CUDA's toolkit"
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

# Seeds that nobody has seen, for SECONDS; what fails prints the shortest trace that still does.
# Then real threads, whose interleaving no seed repeats.
soak: tools
	VBAR_SIM_SECONDS=$(or $(SECONDS),600) cargo test --test sim every_sequence -- --nocapture
	cargo build --release --bin vbar
	$(VBAR) stress --device sim --threads 8 --operations $(STRESS_OPERATIONS)
	$(VBAR) stress --device sim --seconds $(STRESS_SECONDS) --fail 0.02

# What takes a new way stays in fuzz/found; what fails, in fuzz/artifacts: put it into
# tests/fuzz/corpus, where `make test` runs it too.
fuzz: tools
	@rustup run nightly rustc --version >/dev/null 2>&1 || { \
	  echo "missing: a nightly toolchain, which libFuzzer needs. rustup toolchain install nightly" >&2; \
	  exit 1; }
	@cargo fuzz --version >/dev/null 2>&1 || { \
	  echo "missing: cargo-fuzz. cargo install cargo-fuzz" >&2; exit 1; }
	@for target in $(or $(TARGET),$(FUZZ_TARGETS)); do \
	  mkdir -p fuzz/found/$$target; \
	  cargo +nightly fuzz run --fuzz-dir fuzz $$target fuzz/found/$$target \
	    tests/fuzz/corpus/$$target -- -max_total_time=$(or $(SECONDS),600) -max_len=4096 \
	    -rss_limit_mb=4096 -timeout=60 -verbosity=0 -print_final_stats=1 || exit; \
	done

# The files of src/ with loom's atomics and locks in place of the standard library's: a package of
# its own, built in seconds (src/every_order.rs, tests/loom).
loom: tools
	cargo test --manifest-path tests/loom/Cargo.toml --target-dir $(FOLDER)/loom every_order

# Says what it needs when it is not there.
sanitize: tools
	scripts/sanitize.sh $(SANITIZERS)

# Invalid accesses, values that nobody wrote, and leaks fail it; what is suppressed, and why, is in
# tests/abi/valgrind.supp.
memcheck: tools
	@command -v valgrind >/dev/null || { \
	  echo "missing: valgrind. Debian, Ubuntu: apt-get install valgrind" >&2; exit 1; }
	@command -v c++ >/dev/null || { \
	  echo "missing: c++. Debian, Ubuntu: apt-get install g++" >&2; exit 1; }
	cargo test --test install -- --ignored checked memcheck
	cargo test --test abi_cpp -- valgrind engine
	cargo test --test abi torch::

# Builds into a folder of its own and installs into another; nothing outside the target folder.
test-install: tools
	cargo test --test install -- --ignored

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

build: $(STAGED)/done

# The library is built as nothing else: beside the crate's form for Rust it would not be optimised
# as a whole, which costs a hit a tenth.

$(STAGED)/done: $(shell find src -type f) build.rs Cargo.toml Cargo.lock packaging/archive.sh
	@$(MAKE) --no-print-directory tools
	cargo build --profile $(PROFILE) --bin vbar
	cargo rustc --profile $(PROFILE) --lib --crate-type cdylib
	cargo rustc --profile $(PROFILE) --lib --crate-type staticlib -- \
	    --print native-static-libs=$(BUILT)/native-static-libs
	rm -rf $(STAGED)
	mkdir -p $(STAGED)/completions
	cp $(BUILT)/vbar $(BUILT)/libvbar.so $(BUILT)/native-static-libs $(STAGED)
	packaging/archive.sh $(BUILT)/libvbar.a $(STAGED)/libvbar.a
	$(BUILT)/vbar man > $(STAGED)/vbar.1
	for shell in bash zsh fish; do \
	    $(BUILT)/vbar completions $$shell > $(STAGED)/completions/$$shell || exit; \
	done
	touch $@

INSTALL := DESTDIR="$(DESTDIR)" PREFIX="$(PREFIX)" BINDIR="$(BINDIR)" LIBDIR="$(LIBDIR)" \
           INCLUDEDIR="$(INCLUDEDIR)" DATADIR="$(DATADIR)" MANDIR="$(MANDIR)" \
           VERSION="$(VERSION)" ABI="$(ABI)" packaging/install.sh

install: $(STAGED)/done
	$(INSTALL) install $(STAGED)

install-strip: $(STAGED)/done
	STRIP=yes $(INSTALL) install $(STAGED)

uninstall:
	$(INSTALL) uninstall $(STAGED)

# Carries the library: whoever installs it needs no compiler.
wheel: tools
	rm -rf dist
	python3 -m pip wheel --no-deps --wheel-dir dist ./python_shim
	python3 tests/python/check_wheel.py dist/vbar_cuda-*.whl

# Needs a GPU and fails without one.
device: device-bundle
	device-bundle/device-run.sh

device-sanitizer: device-bundle
	device-bundle/device-run.sh sanitizer

device-bundle: tools
	scripts/device-bundle.sh

clean-demo:
	rm -rf demo-data

# One release build more; what continuous integration leaves out.
test-install-release:
	scripts/install-release.sh
