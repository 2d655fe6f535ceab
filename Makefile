.PHONY: test loom lint doc bench

# Everything that must pass, on any machine with a Rust toolchain.
test: loom
	cargo test --workspace --all-features

# Every interleaving of the fabric's signals. A target folder of its own, as --cfg loom rebuilds everything.
loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release -p antiphon-fabric --lib -- model

lint: doc
	cargo fmt --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --all-features

# Needs Open MPI and mpi4py: see benches/README.md.
bench:
	cargo build --release
	python3 benches/host_vs_openmpi.py
