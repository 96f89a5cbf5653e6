# Functions for the commands of vLLM's descriptions. Each server is a process of the benchmark, with
# its engine's processes in its process group.

send() { # signal, name
    kill "-$1" -- "-$(cat "$RUN/$2.pid")"
}

answers() { # port
    curl -sf -m 2 -o /dev/null "http://127.0.0.1:$1/health"
}

is_gone() { # port
    ! answers "$1"
}

wait_until() { # seconds, command
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.2
    done
}

is_idle() { # port
    ! curl -sf -m 2 "http://127.0.0.1:$1/metrics" |
        grep -E '^vllm:num_requests_(running|waiting)\{' | grep -vq ' 0\.0$'
}

set_state() { # name, state of the server in haproxy
    exec 3<> "/dev/tcp/127.0.0.1/$ADMIN_PORT"
    echo "set server replicas/$1 state $2" >&3
    cat <&3
    exec 3>&-
}

# As an operator restarts a replica: no new requests, the running ones end, then the process.
restart() { # name, port
    sleep 2 # haproxy's checks must have seen the replica that was restarted before
    set_state "$1" drain
    wait_until 100 is_idle "$2"
    kill -TERM "$(cat "$RUN/$1.pid")"
    wait_until 60 is_gone "$2"
    set_state "$1" ready # haproxy's health check decides from here on
}

# Drops all packets to a server's port. Needs root and iptables.
cut_port() { iptables -I INPUT -p tcp --dport "$1" -j DROP; }
mend_port() { iptables -D INPUT -p tcp --dport "$1" -j DROP; }
