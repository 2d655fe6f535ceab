# Of the scripts that run bundles, which source this: `here` is the bundle's folder.
# shellcheck shell=bash

# Installs the wheels into a folder of the bundle, so that nothing of the machine changes, for this process. What pip says goes to a file;
# `reason` tells why it failed.
install() {
    local said=$1 to=$here/installed
    command -v python3 >/dev/null || { reason="no python3"; return 1; }
    if [[ ! -d $to ]]; then
        python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$to.new" \
            "$here"/wheels/*.whl >"$said" 2>&1 && mv "$to.new" "$to" ||
            { reason="the wheel cannot be installed: see $said"; return 1; }
    fi
    [[ :${PYTHONPATH:-}: == *:$to:* ]] || export PYTHONPATH=$to${PYTHONPATH:+:$PYTHONPATH}
}
