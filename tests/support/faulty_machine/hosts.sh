# Two hosts: each has a name and a network of its own, and a cable connects them. Arguments: what starts a node before
# the option --node-rank, two slashes, and what follows it.
set -eu
before=() after=()
while [ "$1" != // ]; do before+=("$1"); shift; done
shift
after=("$@")
export BEFORE="${before[*]@Q}" AFTER="${after[*]@Q}"
exec unshare --net --uts bash -euc '
    hostname one
    ip link set lo up
    ip link add left type veth peer name right
    ip address add 10.77.0.1/24 dev left
    ip link set left up
    unshare --net --uts bash -euc "
        hostname two
        ip link set lo up
        until ip link show right > /dev/null 2>&1; do sleep 0.05; done
        ip address add 10.77.0.2/24 dev right
        ip link set right up
        export GLOO_SOCKET_IFNAME=right
        eval \"exec $BEFORE --node-rank 1 $AFTER\"
    " &
    other=$!
    until ip link set right netns $other 2> /dev/null && ! ip link show right > /dev/null 2>&1; do sleep 0.05; done
    export GLOO_SOCKET_IFNAME=left
    eval "$BEFORE --node-rank 0 $AFTER"
    wait $other
'
