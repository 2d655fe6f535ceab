# What the scripts that build bundles share, which source this: `bundle` is the folder, `target` Cargo's, `python` the interpreter.
# shellcheck shell=bash

# Smaller programs: tests and examples instantiate the same generic code.
export CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1

# The Python package, and pytest with what it needs.
add_wheels() {
    "$python" -m maturin build --quiet --release --strip --out "$bundle/wheels"
    # Kept beside the bundle, so that only the first build needs a network.
    local wheels=$target/gpu-bundle-wheels
    if ! compgen -G "$wheels/pytest-*.whl" >/dev/null; then
        "$python" -m pip download --quiet --disable-pip-version-check --only-binary :all: --dest "$wheels" pytest
    fi
    cp "$wheels"/*.whl scripts/bundle/install.sh "$bundle/wheels/"
}

# Writes the commit, of which records tell, and says how large the bundle is when `tar OPTION` packs it.
finish() {
    local option=$1 limit_mib=$2 size_mib
    "$python" -c 'import sys; sys.path.insert(0, "benches"); import record; print(record.commit())' >"$bundle/COMMIT"
    size_mib=$(($(tar --create "$option" --directory "$target" "$(basename "$bundle")" | wc --bytes) / 1048576 + 1))
    echo "$bundle: $size_mib MiB when it is packed, at most $limit_mib"
    if ((size_mib > limit_mib)); then
        du --apparent-size --all --human-readable "$bundle" | sort -rh | head >&2
        exit 1
    fi
}
