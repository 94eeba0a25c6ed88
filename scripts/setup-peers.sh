#!/usr/bin/env bash
# Sets up the programs that `bench peers` and `bench nbd` measure ringmill against, newest versions,
# without touching this machine's own packages. Makes a Debian sid tree with qemu-storage-daemon and QEMU,
# nbdkit, libnbd, and fio built with its libblkio engine (a second vhost-user-blk client), plus fio's bare io_uring loop.
#
#   usage: scripts/setup-peers.sh            make or update the tree (as root; about 5 minutes, 1.5 GB)
#          scripts/setup-peers.sh --unmount  release /proc, /sys, /dev from it (before removing it)
#
# RINGMILL_PEERS names the tree (default /var/tmp/ringmill-peers); `bench` reads the same variable.
# In the tree: qemu-storage-daemon, qemu-system-x86_64, qemu-nbd, nbdkit, nbdcopy, fio-blkio, t_io_uring.
set -euo pipefail

tree=${RINGMILL_PEERS:-/var/tmp/ringmill-peers}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
# sid's Release file is valid for a week only; a mirror or a clock that is off by more than that makes
# apt refuse it as expired. Its signature is checked all the same.
apt_options=(-o Acquire::Check-Valid-Until=false -o DPkg::Lock::Timeout=300 -q)
packages=(
  qemu-system-common qemu-system-x86 qemu-utils # qemu-storage-daemon is in qemu-system-common
  nbdkit libnbd-bin python3 python3-libnbd
  build-essential dpkg-dev pkgconf libaio-dev libblkio-dev liburing-dev zlib1g-dev # to build fio
)
log=$(mktemp -t setup-peers.XXXXXX)

die() { echo "setup-peers: $*" >&2; exit 1; }

# Runs a step with its output in the log; shows the end of it when the step fails.
step() {
  local what=$1; shift
  echo "$what"
  "$@" >>"$log" 2>&1 || { tail -n 25 "$log" >&2; die "failed: $what (whole log: $log)"; }
}

in_tree() {
  chroot "$tree" /usr/bin/env DEBIAN_FRONTEND=noninteractive PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin "$@"
}

unmount_all() {
  local dir
  for dir in dev/shm dev sys proc; do
    if mountpoint -q "$tree/$dir"; then umount "$tree/$dir"; fi
  done
}

mount_all() {
  local dir
  for dir in proc sys dev dev/shm; do
    mountpoint -q "$tree/$dir" || mount --bind "/$dir" "$tree/$dir"
  done
}

# Debian's fio has no libblkio engine, since nothing but a build-time dependency is missing for it.
build_fio() {
  in_tree sh -euc '
    rm -rf /usr/src/fio && mkdir -p /usr/src/fio && cd /usr/src/fio
    apt-get '"${apt_options[*]}"' source --tar-only --download-only fio
    tar --strip-components=1 -xf fio_*.orig.tar.*
    ./configure
    nice make -j"$(nproc)" fio t/io_uring
    install fio /usr/local/bin/fio-blkio
    install t/io_uring /usr/local/bin/t_io_uring'
}

[ "$(id -u)" = 0 ] || die "has to run as root (chroot, mount); try: sudo $0"
if [ "${1:-}" = --unmount ]; then unmount_all; exit; fi
[ $# = 0 ] || die "unknown argument '$1'; the only one is --unmount"

if ! command -v debootstrap >/dev/null; then
  step "installing debootstrap" apt-get "${apt_options[@]}" install -y debootstrap
fi
if [ ! -x "$tree/usr/bin/apt-get" ]; then
  step "making a Debian sid tree in $tree" debootstrap --variant=minbase sid "$tree" "$mirror"
fi
mount_all
# No daemon is to be started by a package that is installed into the tree.
printf '#!/bin/sh\nexit 101\n' >"$tree/usr/sbin/policy-rc.d"
chmod +x "$tree/usr/sbin/policy-rc.d"
printf 'deb %s sid main\ndeb-src %s sid main\n' "$mirror" "$mirror" >"$tree/etc/apt/sources.list"

step "reading the package lists" in_tree apt-get "${apt_options[@]}" update
step "installing QEMU, nbdkit and build tools" \
  in_tree apt-get "${apt_options[@]}" install -y --no-install-recommends "${packages[@]}"
if ! in_tree fio-blkio --enghelp=libblkio >/dev/null 2>&1; then
  step "building fio with libblkio" build_fio
fi

in_tree fio-blkio --enghelp=libblkio >/dev/null || die "the fio that was built has no libblkio engine ($log)"
in_tree qemu-storage-daemon --version | head -n 1
in_tree fio-blkio --version
rm -f "$log"
echo "peers are ready in $tree"
