#!/usr/bin/env bash
# Two machines on one: two network namespaces with a cable between them, two ranks on each, and an all-reduce over all four.
#
#     bash examples/two_machines.sh
#
# It needs a Rust toolchain, UCX 1.13 or newer, iproute2 and util-linux, and the right to make namespaces (root, or user namespaces).
set -euo pipefail
cd "$(dirname "$0")/.."

lacks() {
    echo "two_machines.sh: $1" >&2
    exit 1
}
for program in cargo ip unshare nsenter; do
    command -v "$program" > /dev/null || lacks "there is no $program: a Rust toolchain, iproute2 and util-linux are needed"
done
cargo build --quiet --release -p antiphon-cli -p antiphon --bin antiphon --example all_reduce
antiphon=$PWD/target/release/antiphon
program=$PWD/target/release/examples/all_reduce
if "$antiphon" doctor | grep -E '^ *missing +UCX'; then
    lacks "install libucx0 (Debian, Ubuntu), or libucx-cu13 with pip in an active environment, or set ANTIPHON_UCX to libucp.so.0"
fi

# Each namespace mounts sysfs anew, as UCX lists the devices there. A plain user makes the namespaces inside of a user namespace.
user=()
[ "$(id -u)" = 0 ] || user=(--user --map-root-user)
export ANTIPHON_SECRET UCX_TLS=tcp UCX_NET_DEVICES=cable antiphon program
ANTIPHON_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
exec timeout 120 unshare "${user[@]}" --net --mount --kill-child --fork bash -c '
    set -e
    mount -t sysfs sysfs /sys
    ip link set lo up
    # The other machine ends when its input does.
    coproc other { exec unshare --net --mount sh -c "mount -t sysfs sysfs /sys && ip link set lo up && echo \$\$ && exec cat"; }
    read -r second <&"${other[0]}"
    ip link add cable type veth peer name cable netns "$second"
    ip addr add 10.77.0.1/24 dev cable
    ip link set cable up
    nsenter --target "$second" --net sh -c "ip addr add 10.77.0.2/24 dev cable && ip link set cable up"
    on_second="nsenter --target $second --net --mount --wd=$PWD"
    for side in "" "$on_second"; do
        until $side grep -q up /sys/class/net/cable/operstate; do sleep 0.01; done
    done
    run="$antiphon run -n 2 --nnodes 2 --master-addr 10.77.0.1 --master-port 29500"
    $on_second $run --node-rank 1 -- "$program" &
    $run --node-rank 0 -- "$program"
    wait $!
    echo "4 ranks on 2 machines agree"
'
