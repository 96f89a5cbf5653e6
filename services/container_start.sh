#!/bin/sh
# Starts a worker in a container: pagewire-worker ROLE [OPTION]...
# Containers of one service have one configuration; what differs between them is found out here.
set -eu
role=$1
shift

# The container's id, which other containers of its networks can resolve, whatever its address is.
: "${PAGEWIRE_WORKER_ID:=$role-$(hostname)}" "${PAGEWIRE_ADVERTISE_HOST:=$(hostname)}"
export PAGEWIRE_WORKER_ID PAGEWIRE_ADVERTISE_HOST

# Each worker takes the first of these GPUs that is free. The lock is gone with the process. The
# others stay visible after it, since CUDA IPC reaches only devices that a process can see.
if [ -n "${PAGEWIRE_GPUS:-}" ]; then
    for gpu in $(echo "$PAGEWIRE_GPUS" | tr , ' '); do
        exec 9>"${PAGEWIRE_GPU_LOCKS:-/run/pagewire}/gpu-$gpu"
        if flock --nonblock 9; then
            others=$(echo ",$PAGEWIRE_GPUS," | sed "s/,$gpu,/,/; s/^,//; s/,\$//")
            export CUDA_VISIBLE_DEVICES="$gpu${others:+,$others}"
            exec pagewire "$role" "$@"
        fi
    done
    echo "pagewire: all GPUs of PAGEWIRE_GPUS=$PAGEWIRE_GPUS have a worker already" >&2
    exit 2
fi
exec pagewire "$role" "$@"
