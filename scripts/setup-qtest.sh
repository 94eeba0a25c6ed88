#!/bin/sh
# Builds QEMU's ahci-test, target/qtest/ahci-test, from Debian's source of QEMU 10 (as root, for the packages; some 20 minutes
# on one CPU), and ahci-test-relaxed, some of whose asserts can be switched off: scripts/ahci-qtest has both run.
set -eu

cd "$(dirname "$0")/.."
tests=$PWD/target/qtest
relax=$PWD/scripts/ahci-qtest/relax
mkdir -p "$tests"
[ ! -x "$tests/ahci-test-relaxed" ] || [ "$relax" -nt "$tests/ahci-test-relaxed" ] || exit 0

packages="meson ninja-build libglib2.0-dev python3-venv python3-setuptools python3-pip python3-wheel flex bison libfdt-dev
    zlib1g-dev pkgconf gcc dpkg-dev xz-utils qemu-utils"
# shellcheck disable=SC2086 # a list of names
if [ "$(dpkg-query -W -f '${Status}\n' $packages 2>/dev/null | grep -c '^install ok installed$')" != "$(echo $packages | wc -w)" ]; then
    DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends $packages
fi

work=$(mktemp -d -p /var/tmp)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/source"
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
for suite in trixie bookworm-backports; do
    echo "deb-src $mirror $suite main"
done >"$work/sources.list"
apt="-q -o Dir::Etc::SourceList=$work/sources.list -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists=$work/lists
    -o Dir::Cache=$work/cache -o Acquire::Check-Valid-Until=false -o APT::Sandbox::User=root"
# shellcheck disable=SC2086 # a list of options
(
    apt-get $apt update
    version=$(apt-cache $apt showsrc qemu | awk '$1 == "Version:" && $2 ~ /^1:10\./ { print $2 }' | sort -V | tail -n 1)
    cd "$work"
    apt-get $apt source --tar-only --download-only "qemu=$version"
)
tar -C "$work/source" --strip-components=1 -xf "$work"/qemu_*.orig.tar.xz

# Debian's tar file has no firmware images. The build wants them to be there, and uses none.
cd "$work/source"
sed -n '/blobs = \[/,/\]/p' pc-bios/meson.build | grep -o "'[^']*'" | tr -d "'" | while read -r file; do
    [ -e "pc-bios/$file" ] || { mkdir -p "$(dirname "pc-bios/$file")" && touch "pc-bios/$file"; }
done
# Debian 12's Meson is too old: PyPI has the version that QEMU names.
sed -n 's/^\(meson\|pycotap\) = .*installed = "\([^"]*\)".*/\1==\2/p' pythondeps.toml |
    xargs python3 -m pip download -q --no-deps -d python/wheels
tries=0
until
    rm -rf build && mkdir build
    (cd build && PATH=/usr/bin:/bin ../configure --python=/usr/bin/python3 --target-list=x86_64-softmmu \
        --without-default-features --disable-docs --enable-fdt=system --disable-pixman --disable-install-blobs \
        --enable-tools) >"$work/log" 2>&1
do
    # The name of one more file that is missing.
    missing=$(sed -n 's|^\.\./\(.*\)meson.build:.* ERROR: File \(.*\) does not exist.*|\1\2|p' "$work/log")
    tries=$((tries + 1))
    [ -n "$missing" ] && [ "$tries" -lt 60 ] || { tail -n 20 "$work/log" >&2; exit 1; }
    mkdir -p "$(dirname "$missing")" && touch "$missing"
done
ninja -C build tests/qtest/ahci-test
cp build/tests/qtest/ahci-test "$tests/ahci-test"
"$relax" .
ninja -C build tests/qtest/ahci-test
cp build/tests/qtest/ahci-test "$tests/ahci-test-relaxed"
