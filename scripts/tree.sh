# Debian trees for programs in other versions than this machine's. Sourced by setup-peers.sh and setup-field.sh,
# which set `tree` (the tree's folder) first. Needs root (chroot, mount).
# shellcheck shell=bash

mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
# sid's Release file is valid for a week only; a mirror or a clock that is off by more than that makes
# apt refuse it as expired. Its signature is checked all the same.
apt_options=(-o Acquire::Check-Valid-Until=false -o DPkg::Lock::Timeout=300 -q)
script=$(basename "$0" .sh)
log=${TMPDIR:-/tmp}/$script.$$.log

die() { echo "$script: $*" >&2; exit 1; }

# Runs a step with its output in the log; shows the end of it when the step fails.
step() {
  local what=$1; shift
  echo "$what"
  "$@" >>"$log" 2>&1 || { tail -n 25 "$log" >&2; die "failed: $what (whole log: $log)"; }
}

in_tree() {
  chroot "$tree" /usr/bin/env DEBIAN_FRONTEND=noninteractive PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
}

unmount_tree() {
  local dir
  for dir in dev/shm dev sys proc; do
    if mountpoint -q "$tree/$dir"; then umount "$tree/$dir"; fi
  done
}

mount_tree() {
  local dir
  for dir in proc sys dev dev/shm; do
    mountpoint -q "$tree/$dir" || mount --bind "/$dir" "$tree/$dir"
  done
}

need_root() {
  [ "$(id -u)" = 0 ] || die "has to run as root (chroot, mount); try: sudo $0"
}

# make_tree SUITE: makes the tree if it is missing, mounts /proc, /sys and /dev there, and reads the package lists.
make_tree() {
  local suite=$1
  if ! command -v debootstrap >/dev/null; then
    step "installing debootstrap" apt-get "${apt_options[@]}" install -y debootstrap
  fi
  # debootstrap removes its folder when it is done. A tree that was interrupted begins anew.
  if [ ! -x "$tree/usr/bin/apt-get" ] || [ -e "$tree/debootstrap" ]; then
    unmount_tree
    rm -rf --one-file-system "$tree"
    step "making a Debian $suite tree in $tree" debootstrap --variant=minbase "$suite" "$tree" "$mirror"
  fi
  mount_tree
  # No daemon is to be started by a package that is installed into the tree.
  printf '#!/bin/sh\nexit 101\n' >"$tree/usr/sbin/policy-rc.d"
  chmod +x "$tree/usr/sbin/policy-rc.d"
  printf 'deb %s %s main\ndeb-src %s %s main\n' "$mirror" "$suite" "$mirror" "$suite" >"$tree/etc/apt/sources.list"
  step "reading the package lists of $suite" in_tree apt-get "${apt_options[@]}" update
}

# install_in_tree WHAT PACKAGE...
install_in_tree() {
  local what=$1; shift
  step "installing $what" in_tree apt-get "${apt_options[@]}" install -y --no-install-recommends "$@"
}
