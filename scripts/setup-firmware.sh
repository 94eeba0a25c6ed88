#!/bin/sh
# Sets up what tests of firmware on vfio-user exports need beside scripts/setup-vfio-user.sh (as root): OVMF, U-Boot, and a
# disk that SeaBIOS, OVMF and U-Boot boot, target/guest/boot.img. On the disk are GRUB for BIOS and EFI, a configuration
# for U-Boot, Debian's cloud kernel, and an initramfs whose /init prints the kernel's command line and powers off.
set -eu

cd "$(dirname "$0")/.."
guest=$PWD/target/guest
disk=$guest/boot.img
packages="dosfstools fdisk grub-common grub-efi-amd64-bin grub-pc-bin mtools ovmf u-boot-qemu"
# shellcheck disable=SC2086 # a list of names
if [ "$(dpkg-query -W -f '${Status}\n' $packages 2>/dev/null | grep -c '^install ok installed$')" != "$(echo $packages | wc -w)" ]; then
    DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends $packages
fi
if [ -e "$disk" ] && [ ! "$0" -nt "$disk" ] && [ ! "$guest/vmlinuz" -nt "$disk" ]; then
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PATH=$PATH:/usr/sbin:/sbin

mkdir -p "$work/root/bin" "$work/root/proc"
cp /bin/busybox "$work/root/bin/"
cat >"$work/root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mount -t proc none /proc
/bin/busybox cat /proc/cmdline
/bin/busybox poweroff -f
INIT
chmod 755 "$work/root/init"
(cd "$work/root" && find . | LC_ALL=C sort | cpio --quiet -o -H newc) | gzip >"$work/initramfs"

options="console=ttyS0 quiet panic=-1 no_timer_check"
cat >"$work/grub.cfg" <<CONFIG
serial --unit=0 --speed=115200
terminal_output serial
search --no-floppy --file --set=root /vmlinuz
echo "GRUB on \$grub_platform"
linux /vmlinuz $options booted_by=grub-\$grub_platform
initrd /initramfs
boot
CONFIG
cat >"$work/extlinux.conf" <<CONFIG
default linux
label linux
    kernel /vmlinuz
    initrd /initramfs
    append $options booted_by=u-boot
CONFIG

modules="normal serial terminal search search_fs_file part_msdos fat linux echo boot"
grub-mkimage -O i386-pc -o "$work/core.img" -c "$work/grub.cfg" -p / biosdisk $modules
grub-mkimage -O x86_64-efi -o "$work/bootx64.efi" -c "$work/grub.cfg" -p / $modules

# One partition, from 1 MiB on. GRUB's image for BIOS is between the partition table and it.
truncate -s 64M "$work/disk"
echo 'label: dos
start=2048, type=ef, bootable' | sfdisk -q "$work/disk"
dd if=/usr/lib/grub/i386-pc/boot.img of="$work/disk" bs=440 count=1 conv=notrunc status=none
dd if="$work/core.img" of="$work/disk" bs=512 seek=1 conv=notrunc status=none
mkfs.fat --offset 2048 "$work/disk" $((63 * 1024)) >/dev/null
at="$work/disk@@1M"
mmd -i "$at" ::/EFI ::/EFI/BOOT ::/extlinux
mcopy -i "$at" "$work/bootx64.efi" ::/EFI/BOOT/BOOTX64.EFI
mcopy -i "$at" "$work/extlinux.conf" ::/extlinux/extlinux.conf
mcopy -i "$at" "$guest/vmlinuz" "$work/initramfs" ::/
mv "$work/disk" "$disk"
ls -lh "$disk"
