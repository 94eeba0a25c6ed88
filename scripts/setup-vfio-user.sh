#!/bin/sh
# Sets up what the guests of vfio-user exports need beside scripts/setup-tests.sh: QEMU 11, from the tree of
# scripts/setup-peers.sh (as root; some minutes), and Debian's generic kernel with an initramfs, under
# target/guest/generic. The cloud kernel has no driver for AHCI. nvme-cli is installed, and put into the initramfs.
set -eu

cd "$(dirname "$0")/.."
guest=$PWD/target/guest
[ -x "${RINGMILL_PEERS:-/var/tmp/ringmill-peers}/usr/bin/qemu-system-x86_64" ] || scripts/setup-peers.sh

[ ! -e "$guest/generic/vmlinuz" ] || [ ! "$guest/initramfs" -nt "$guest/generic/initramfs" ] || rm "$guest/generic/initramfs"
[ ! "$0" -nt "$guest/generic/initramfs" ] || rm -f "$guest/generic/initramfs"
[ ! -e "$guest/generic/initramfs" ] || exit 0
command -v nvme >/dev/null || PATH=$PATH:/usr/sbin command -v nvme >/dev/null || apt-get -q -y install nvme-cli
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/root" "$guest/generic"

package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')
(cd "$work" && apt-get -q -o APT::Sandbox::User=root download "$package" && dpkg -x ./*.deb kernel)
version=$(basename "$work"/kernel/lib/modules/*)
depmod -b "$work/kernel" "$version"

# The programs and /init of the other guests, with this kernel's modules.
(cd "$work/root" && cpio -idm --quiet) <"$guest/initramfs"
nvme=$(PATH=$PATH:/usr/sbin command -v nvme)
cp -L "$nvme" "$work/root/bin/"
ldd "$nvme" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$work/root$(dirname "$library")"
    cp -L "$library" "$work/root$library"
done
rm "$work"/root/lib/modules/*
n=10
for module in qemu_fw_cfg ahci nvme virtio_pci virtio_blk sd_mod ext4; do
    modprobe -d "$work/kernel" -S "$version" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
done | awk '!seen[$0]++' | while read -r path; do
    cp "$path" "$work/root/lib/modules/$n-$(basename "$path")"
    n=$((n + 1))
done
cp "$work/kernel/boot/vmlinuz-$version" "$guest/generic/vmlinuz"
(cd "$work/root" && find . | LC_ALL=C sort | cpio --quiet -o -H newc) >"$work/initramfs"
mv "$work/initramfs" "$guest/generic/initramfs"
ls -lh "$guest/generic"
