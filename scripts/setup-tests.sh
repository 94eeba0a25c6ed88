#!/bin/sh
# Installs what the integration tests need on a bare Debian 12 (amd64) machine, and builds the guest that they boot:
# Debian's cloud kernel and its initramfs, under target/guest. Run it again at any time; it redoes only what changed.
set -eu

cd "$(dirname "$0")/.."
guest=$PWD/target/guest
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo

# QEMU comes from bookworm-backports (10.0): the release that its users run, and the one that the peers' figures are
# taken with. Debian 12's own is 7.2, and the two cannot be installed side by side.
# fuse3 has fusermount3, which mounts for users without privileges.
# gcc links Rust programs, g++ builds the fuzzer's runtime. event-loop's feature `glib` links to GLib.
# valgrind counts the instructions of `bench guards`. groff and mandoc check the man pages, fish and zsh their
# completions. systemd has systemd-socket-activate and systemd-analyze; rpm has rpmbuild. gnutls-bin makes
# certificates. nbdkit is a peer of `bench nbd`. qemu-block-extra has QEMU's driver `http`.
packages="busybox-static cpio curl e2fsprogs fio fish fuse3 g++ gnutls-bin groff-base kmod libglib2.0-dev libnbd-bin lz4 mandoc nbdkit pkgconf procps python3 python3-libnbd python3-prometheus-client python3-venv rpm sg3-utils systemd sysvinit-utils util-linux valgrind xz-utils zsh zstd"
qemu="qemu-block-extra qemu-system-x86 qemu-utils"

installed() {
    # shellcheck disable=SC2086 # a list of names
    dpkg-query -W -f '${Status}\n' $packages $qemu 2>/dev/null | grep -c '^install ok installed$'
}

apt() {
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -y "$@"
}

# shellcheck disable=SC2086
if [ "$(installed)" != "$(echo $packages $qemu | wc -w)" ] || [ ! -e "$guest/vmlinuz" ] ||
    [ ! -e target/prometheus/usr/bin/promtool ]; then
    if ! apt-cache policy | grep -q 'bookworm-backports/main'; then
        echo 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm-backports main' |
            $sudo tee /etc/apt/sources.list.d/bookworm-backports.list >/dev/null
    fi
    apt update
    apt install --no-install-recommends $packages
    apt install --no-install-recommends -t bookworm-backports $qemu
fi

# A Ceph cluster of one node, for the tests of driver rbd.
scripts/setup-ceph.sh

# The test runner, in a version that Rust 1.91 and later can build. The first build takes minutes.
if ! cargo nextest --version >/dev/null 2>&1; then
    cargo install cargo-nextest --locked --version 0.9.143 --no-default-features --features default-no-update
fi

mkdir -p "$guest"

# The QMP client that QEMU's own tests use, by the same people, at a version known to work.
client=qemu.qmp==0.0.6
if ! target/python/bin/pip freeze 2>/dev/null | grep -qxF "$client"; then
    rm -rf target/python
    /usr/bin/python3 -m venv target/python
    target/python/bin/pip -q install --disable-pip-version-check "$client"
fi

# QEMU's programs, with quick LUKS headers.
mkdir -p target/tools
gcc -shared -fPIC -O -o target/tools/quick_keys.so tests/clients/quick_keys.c
for program in qemu-img qemu-storage-daemon; do
    printf '#!/bin/sh\nLD_PRELOAD=%s/target/tools/quick_keys.so exec %s "$@"\n' "$PWD" "$(command -v $program)" >"target/tools/$program"
    chmod 755 "target/tools/$program"
done

# Unpacks a package into a folder: PACKAGE FOLDER. Nothing is installed.
unpack() {
    download=$(mktemp -d)
    (cd "$download" && apt-get -q -o APT::Sandbox::User=root download "$1")
    rm -rf "$2"
    dpkg -x "$download"/*.deb "$2"
    rm -r "$download"
}

# Prometheus and promtool. Installed, its service would start with the machine.
[ -e target/prometheus/usr/bin/promtool ] || unpack prometheus target/prometheus

# A web server for driver http. Installed, its service would start with the machine.
[ -e target/nginx/usr/sbin/nginx ] || unpack nginx target/nginx

# The kernel is unpacked, not installed: nothing outside of target/ has to do with the guest.
if [ ! -e "$guest/vmlinuz" ]; then
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')
    unpack "$package" "$guest/kernel"
    version=$(basename "$guest"/kernel/lib/modules/*)
    depmod -b "$guest/kernel" "$version"
    cp "$guest/kernel/boot/vmlinuz-$version" "$guest/vmlinuz.new"
    mv "$guest/vmlinuz.new" "$guest/vmlinuz"
fi
if [ ! "$guest/vmlinux" -nt "$guest/vmlinuz" ]; then
    scripts/unpack-kernel "$guest/vmlinuz" "$guest/vmlinux.new"
    mv "$guest/vmlinux.new" "$guest/vmlinux"
fi

# The initramfs: busybox, the programs that jobs call with their shared libraries, the modules, /init.
version=$(basename "$guest"/kernel/lib/modules/*)
root=$(mktemp -d)
work=$(mktemp -d)
trap 'rm -rf "$root" "$work"' EXIT
mkdir -p "$root/bin" "$root/dev" "$root/proc" "$root/sys" "$root/tmp" "$root/mnt" "$root/lib/modules"

# NAME [FOLDER]; the default folder is /bin.
add_program() {
    path=$(PATH=$PATH:/usr/sbin:/sbin:/lib/systemd command -v "$1")
    to=$root${2-/bin}
    mkdir -p "$to"
    rm -f "$to/$1"
    cp -L "$path" "$to/$1"
    ldd "$path" | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
}

# Debian's fio is linked to the libraries of engines that no guest uses: 80 MB, which cost a guest under TCG two seconds per boot
# and one per start of fio. Libraries that define no more than the functions that fio names stand in for them.
add_fio() {
    fio=$(command -v fio)
    ldd "$fio" >"$work/libraries"
    readelf -d "$fio" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -Ev '^lib(aio|c|m|numa|z)\.' >"$work/unused"
    nm -D --undefined-only "$fio" | awk '{ print $2 }' >"$work/undefined"
    mkdir -p "$work/fio" "$root/usr/lib"
    while read -r library; do
        nm -D --defined-only "$(awk -v name="$library" '$1 == name { print $3 }' "$work/libraries")" |
            awk '{ sub(/@.*/, "", $3); print $3 }' >"$work/defined"
        awk -F @ 'NR == FNR { defined[$1]; next } $1 in defined' "$work/defined" "$work/undefined" >"$work/needed"
        awk -F @ '{ print "void " $1 "(void) { __builtin_trap(); }" }' "$work/needed" >"$work/library.c"
        awk -F @ '$2 { names[$2] = names[$2] " " $1 ";" }
            END { for (version in names) print version " { global:" names[version] " };" }' "$work/needed" >"$work/versions"
        versions=
        [ ! -s "$work/versions" ] || versions=-Wl,--version-script,$work/versions
        # shellcheck disable=SC2086 # an option or none
        gcc -w -fno-builtin -shared -nostdlib -Wl,-soname,"$library" $versions -o "$work/fio/$library" "$work/library.c"
    done <"$work/unused"
    LD_LIBRARY_PATH=$work/fio add_program fio
    rm -r "$root$work"
    cp "$work/fio"/* "$root/usr/lib/"
}

add_busybox() {
    mkdir -p "$root/bin"
    cp /bin/busybox "$root/bin/"
    for applet in $(/bin/busybox --list); do
        [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
    done
}

pack() {
    (cd "$root" && find . | LC_ALL=C sort | cpio --quiet -o -H newc) >"$guest/$1.new"
    mv "$guest/$1.new" "$guest/$1"
}

add_busybox
for program in mke2fs e2fsck blkdiscard blockdev fallocate md5sum cmp \
    sg_inq sg_vpd sg_luns sg_modes sg_opcodes sg_persist sg_readcap sg_requests sg_reset sg_sync sg_unmap sg_verify \
    sg_wr_mode sg_write_same; do
    add_program "$program"
done
add_fio

# Modules are loaded in the order of their numbers.
n=10
for module in qemu_fw_cfg virtio_pci virtio_blk virtio_scsi sd_mod; do
    modprobe -d "$guest/kernel" -S "$version" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
done | awk '!seen[$0]++' | while read -r path; do
    cp "$path" "$root/lib/modules/$n-$(basename "$path")"
    n=$((n + 1))
done
cp tests/guest/init "$root/init"
chmod 755 "$root/init"

pack initramfs

# A second one, in which systemd is process 1: this machine's, with the units that all others hang on. It is all in a
# folder that /init makes the root: services have roots of their own, by pivot_root(2), which leaves no initramfs.
rm -rf "$root"
mkdir -p "$root/bin" "$root/lib/modules"
cp /bin/busybox "$root/bin/"
cp tests/guest/init-systemd "$root/init"
chmod 755 "$root/init"
cp "$guest/kernel/lib/modules/$version/kernel/drivers/firmware/qemu_fw_cfg.ko" "$root/lib/modules/"
top=$root
root=$root/system
mkdir -p "$root/dev" "$root/lib/systemd/system" "$root/proc" "$root/run" "$root/sys" "$root/tmp" \
    "$root/usr/bin" "$root/var/lib" "$root/var/tmp"
add_busybox
for program in systemctl systemd-sysusers; do
    add_program "$program"
done
# The second of them since version 255.
add_program systemd /lib/systemd
[ ! -e /lib/systemd/systemd-executor ] || add_program systemd-executor /lib/systemd
for target in basic multi-user paths shutdown slices sockets sysinit timers umount; do
    cp "/lib/systemd/system/$target.target" "$root/lib/systemd/system/"
done
cp -R tests/guest/systemd/. "$root/"
root=$top
pack initramfs-systemd

# The guest in which the daemon runs.
scripts/setup-host-guest.sh
echo "The guest is in $guest:"
ls -lh "$guest/vmlinux" "$guest/initramfs" "$guest/initramfs-systemd"
