#!/usr/bin/env bash
# Sets up the QEMUs and libvirts that operators have, one small Debian tree per release, without touching this machine's
# own packages. tests/tests/field.rs boots guests with each QEMU.
#
#   usage: scripts/setup-field.sh [SUITE...]   make or update these trees, else all (as root; some minutes and 600 MB each)
#          scripts/setup-field.sh --unmount    release /proc, /sys, /dev from trees that an interrupted run has left
#
# RINGMILL_FIELD names the folder of the trees (default /var/tmp/ringmill-field); the tests read the same variable.
#
#   bullseye   QEMU 5.2
#   bookworm   QEMU 7.2, libvirt 9.0
#   trixie     QEMU 10.0 with what Debian takes from its stable branch, libvirt 11.3
#   sid        the newest QEMU
#
# QEMU of bookworm-backports is the one that scripts/setup-tests.sh installs.
set -euo pipefail

cd "$(dirname "$0")"
field=${RINGMILL_FIELD:-/var/tmp/ringmill-field}
all=(bullseye bookworm trixie sid)
tree=$field
# shellcheck source=scripts/tree.sh
. ./tree.sh

need_root
if [ "${1:-}" = --unmount ]; then
  for suite in "${all[@]}"; do
    tree=$field/$suite
    unmount_tree
  done
  exit
fi
[ $# -gt 0 ] || set -- "${all[@]}"
trap unmount_tree EXIT
for suite; do
  tree=$field/$suite
  packages=(qemu-system-x86)
  case $suite in
    bullseye | sid) ;;
    # dnsmasq and the like are for networks, which these guests have none of.
    bookworm | trixie) packages+=(libvirt-daemon-system libvirt-clients) ;;
    *) die "unknown suite '$suite'; known: ${all[*]}" ;;
  esac
  mkdir -p "$field"
  make_tree "$suite"
  install_in_tree "${packages[*]} in $suite" "${packages[@]}"
  in_tree apt-get clean
  in_tree qemu-system-x86_64 --version | head -n 1
  unmount_tree
done
rm -f "$log"
echo "the trees are ready in $field"
