#!/bin/bash
# Starts a worker in a container: pagewire-worker ROLE [OPTION]...
# Containers of one service have one configuration; what differs between them is found out here.
set -eu
role=$1
shift

# The container's id, which other containers of its networks can resolve, whatever its address is.
: "${PAGEWIRE_WORKER_ID:=$role-$(hostname)}" "${PAGEWIRE_ADVERTISE_HOST:=$(hostname)}"
export PAGEWIRE_WORKER_ID PAGEWIRE_ADVERTISE_HOST

# Each worker takes the first of these GPUs that are free, one for each of its ranks. The locks are
# gone with the process. The others stay visible after them, since CUDA IPC reaches only devices
# that a process can see.
if [ -n "${PAGEWIRE_GPUS:-}" ]; then
    locks=${PAGEWIRE_GPU_LOCKS:-/run/pagewire}
    needed=${PAGEWIRE_TENSOR_PARALLEL_SIZE:-1}
    case "${PAGEWIRE_RANKS_SHARE_GPU:-}" in 1 | [Tt]* | [Yy]* | [Oo][Nn]) needed=1 ;; esac
    taken=0 own="" others=""
    # One at a time: two workers might each get a part of the GPUs that one of them needs.
    exec {turn}>"$locks/turn"
    flock --timeout 60 "$turn"
    for gpu in ${PAGEWIRE_GPUS//,/ }; do
        exec {lock}>"$locks/gpu-$gpu"
        if [ "$taken" -lt "$needed" ] && flock --nonblock "$lock"; then
            taken=$((taken + 1)) own+=",$gpu"
        else
            exec {lock}>&-
            others+=",$gpu"
        fi
    done
    exec {turn}>&-
    if [ "$taken" -lt "$needed" ]; then
        echo "pagewire: this worker needs $needed GPUs (PAGEWIRE_TENSOR_PARALLEL_SIZE), and of" \
            "PAGEWIRE_GPUS=$PAGEWIRE_GPUS only $taken have no worker yet" >&2
        exit 2
    fi
    own+=$others
    export CUDA_VISIBLE_DEVICES=${own#,}
fi
exec pagewire "$role" "$@"
