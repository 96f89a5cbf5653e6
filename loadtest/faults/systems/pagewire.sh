# Functions for the commands of Pagewire's descriptions. `pagewire up` is the process "up"; its
# workers and routers are its children.

pid_of() { # prefill-0, decode-1, router-0 ...
    pgrep -P "$(cat "$RUN/up.pid")" -f -- "--(worker|router)-id $1( |\$)"
}

send() { # signal, name
    kill "-$1" "$(pid_of "$2")"
}

send_if_there() { # signal, name
    pid_of "$2" > /dev/null || return 0
    send "$1" "$2"
}

# Names of processes that died and are not ready again, as `pagewire up` reports them at once. Routers
# know of a worker's death only when its connection ends, and of a router's when its lease ends.
died() {
    ls "$RUN"/up.*.log > /dev/null 2>&1 || return 0 # it was started elsewhere
    awk '$4 == "died:" { dead[$3] }
        /^[^ ]+ [^ ]+ [^ ]+ is ready again$/ { delete dead[$3] }
        END { for (name in dead) print name }' "$(ls "$RUN"/up.*.log | sort -V | tail -1)"
}

is_whole() { # number of routers and workers
    local cluster
    [ -z "$(died)" ] || return 1
    cluster=$(curl -sf -m 2 "http://127.0.0.1:$OPERATOR_PORT/cluster") || return 1
    [ "$(grep -o '"state":"ready"' <<< "$cluster" | wc -l)" = "$1" ] || return 1
    ! grep -q '"missing_links":\["' <<< "$cluster"
}

# Drops all packets to the ports on which one worker listens and to which the other is connected.
# Needs root, iptables and ss.
cut_link() { # listening worker, connected worker
    local listens connected port
    listens=$(ss -tlnpH | grep "pid=$(pid_of "$1")," | awk '{print $4}' | grep -o '[0-9]*$' | sort)
    connected=$(ss -tnpH state established | grep "pid=$(pid_of "$2")," | awk '{print $4}' |
        grep -o '[0-9]*$' | sort -u)
    : > "$RUN/cut"
    for port in $(comm -12 <(echo "$listens") <(echo "$connected")); do
        iptables -I INPUT -p tcp --dport "$port" -j DROP && echo "$port" >> "$RUN/cut"
    done
    [ -s "$RUN/cut" ] # there was a link to cut
}

mend_link() {
    local port
    while read -r port; do iptables -D INPUT -p tcp --dport "$port" -j DROP; done < "$RUN/cut"
}
