#!/usr/bin/env bash
# Sees to it that there is a Docker engine with Compose and the base image of our images, or says in
# one line what is missing and ends with 1. With --install it may install and start what is not there.
set -euo pipefail

tag=python:3.11-slim

give_up() {
    echo "no compose tests: $1" >&2
    exit 1
}

may_install() {
    [ "${1:-}" = --install ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null
}

has_compose() {
    docker compose version >/dev/null 2>&1 || docker-compose version >/dev/null 2>&1
}

if ! { command -v docker && has_compose; } >/dev/null 2>&1; then
    may_install "$@" || give_up "Docker and Docker Compose are not installed"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends docker.io docker-compose; } >/dev/null 2>&1 ||
        give_up "apt-get could not install docker.io and docker-compose"
fi

if ! docker info >/dev/null 2>&1; then
    if may_install "$@" && command -v dockerd >/dev/null; then
        setsid dockerd >/tmp/dockerd.log 2>&1 </dev/null &
        [ -z "${DOCKERD_PID_FILE:-}" ] || echo $! >"$DOCKERD_PID_FILE"
        for _ in $(seq 30); do
            docker info >/dev/null 2>&1 && break
            sleep 1
        done
    fi
    docker info >/dev/null 2>&1 || give_up "no Docker engine answers"
fi

docker image inspect "$tag" >/dev/null 2>&1 && exit 0
timeout 300 docker pull -q "$tag" >/dev/null 2>&1 && exit 0

# No registry: Debian 12 has this Python, too.
may_install "$@" || give_up "the image $tag is neither here nor can it be pulled"
command -v debootstrap >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends debootstrap >/dev/null 2>&1 || give_up "debootstrap is not to be had"
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv \
    bookworm "$root" >/tmp/debootstrap.log 2>&1 || give_up "debootstrap failed: /tmp/debootstrap.log"
# What this machine trusts, pip shall trust, too; and it may install alongside Debian's packages.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$root/etc/pip.conf"
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
ln -sf python3 "$root/usr/bin/python"
tar -C "$root" -c . | docker import - "$tag" >/dev/null
