#!/usr/bin/env bash
# Sets up the programs that `bench` measures ringmill against, newest versions,
# without touching this machine's own packages. Makes a Debian sid tree with qemu-storage-daemon and QEMU,
# nbdkit, libnbd, and fio built with its libblkio engine (a second vhost-user-blk client), plus fio's bare io_uring loop.
#
#   usage: scripts/setup-peers.sh            make or update the tree (as root; about 5 minutes, 1.5 GB)
#          scripts/setup-peers.sh --unmount  release /proc, /sys, /dev from it (before removing it)
#
# RINGMILL_PEERS names the tree (default /var/tmp/ringmill-peers); `bench` reads the same variable.
# In the tree: qemu-storage-daemon, qemu-system-x86_64, qemu-nbd, nbdkit, nbdcopy, fio-blkio, t_io_uring.
set -euo pipefail

cd "$(dirname "$0")"
tree=${RINGMILL_PEERS:-/var/tmp/ringmill-peers}
# shellcheck source=scripts/tree.sh
. ./tree.sh
packages=(
  qemu-system-common qemu-system-x86 qemu-utils # qemu-storage-daemon is in qemu-system-common
  qemu-block-extra # its http driver
  nbdkit libnbd-bin python3 python3-libnbd
  build-essential dpkg-dev pkgconf libaio-dev libblkio-dev liburing-dev zlib1g-dev # to build fio
)

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

need_root
if [ "${1:-}" = --unmount ]; then unmount_tree; exit; fi
[ $# = 0 ] || die "unknown argument '$1'; the only one is --unmount"

make_tree sid
install_in_tree "QEMU, nbdkit and build tools" "${packages[@]}"
if ! in_tree fio-blkio --enghelp=libblkio >/dev/null 2>&1; then
  step "building fio with libblkio" build_fio
fi

in_tree fio-blkio --enghelp=libblkio >/dev/null || die "the fio that was built has no libblkio engine ($log)"
in_tree qemu-storage-daemon --version | head -n 1
in_tree fio-blkio --version
rm -f "$log"
echo "peers are ready in $tree"
