#!/bin/sh
# Makes the guest in which the daemon itself runs, for what needs kernel modules of the host: Debian sid's cloud kernel,
# which has ublk and VDUSE, with an initramfs. scripts/setup-tests.sh calls it, and has made the other guests before.
# Nothing is installed: packages are downloaded by apt with a list of its own, and unpacked under target/guest/host.
set -eu

cd "$(dirname "$0")/.."
guest=$PWD/target/guest
host=$guest/host
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}

for source in scripts/setup-host-guest.sh scripts/setup-tests.sh tests/guest/init; do
    [ ! "$source" -nt "$host/initramfs" ] || rm -f "$host/initramfs"
done
[ ! -e "$host/initramfs" ] || exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache" "$work/kernel" "$work/root" "$host"

# Tried with 7.2.13+deb14-cloud-amd64.
if [ ! -e "$host/packages/release" ]; then
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$work/sources.list"
    # COMMAND [ARGUMENT...]: a program of apt for sid.
    sid() {
        program=$1
        shift
        "$program" -q -o APT::Sandbox::User=root -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=- \
            -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o Acquire::Check-Valid-Until=false "$@"
    }
    sid apt-get update
    release=$(sid apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')
    release=${release#linux-image-}
    rm -rf "$host/packages"
    mkdir -p "$host/packages"
    for package in linux-modules linux-binary; do
        (cd "$host/packages" && sid apt-get download "$package-$release")
    done
    echo "$release" >"$host/packages/release"
fi
release=$(cat "$host/packages/release")
for package in "$host"/packages/*.deb; do
    dpkg -x "$package" "$work/kernel"
done
# Without the lists of what is built in, depmod warns.
depmod -b "$work/kernel/usr" "$release" 2>/dev/null

# The programs of the other guests, and those of a host. Modules are unpacked: busybox does not know xz.
(cd "$work/root" && cpio -idm --quiet) <"$guest/initramfs"
rm "$work"/root/lib/modules/*
for module in qemu_fw_cfg loop ublk_drv virtio_blk vduse virtio_vdpa vhost_vdpa; do
    modprobe -d "$work/kernel/usr" -S "$release" --show-depends "$module" >>"$work/modules"
done
n=10
awk '$1 == "insmod" && !seen[$2]++ { print $2 }' "$work/modules" | while read -r path; do
    xz -dc "$path" >"$work/root/lib/modules/$n-$(basename "$path" .xz)"
    n=$((n + 1))
done
# Loaded by jobs that need it: without it and without ublk, the guest has no device for `attach`.
mkdir "$work/root/lib/other-modules"
xz -dc "$(modprobe -d "$work/kernel/usr" -S "$release" --show-depends nbd | awk '$1 == "insmod" { print $2 }')" \
    >"$work/root/lib/other-modules/nbd.ko"
scripts/unpack-kernel "$work/kernel/usr/lib/modules/$release/vmlinuz" "$host/vmlinux"
(cd "$work/root" && find . | LC_ALL=C sort | cpio --quiet -o -H newc) >"$work/initramfs"
mv "$work/initramfs" "$host/initramfs"
ls -lh "$host"
