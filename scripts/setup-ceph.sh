#!/bin/sh
# Installs Ceph's monitor, OSD, object store and tools for the tests of drivers rbd and s3: Debian's packages, some
# 300 MB. The tests start a cluster of one node each, as the user that they run as. scripts/setup-tests.sh calls this.
set -eu

packages="ceph-common ceph-mon ceph-osd librbd1 radosgw"
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo

# shellcheck disable=SC2086 # a list of names
installed=$(dpkg-query -W -f '${Status}\n' $packages 2>/dev/null | grep -c '^install ok installed$' || true)
# shellcheck disable=SC2086
[ "$installed" = "$(echo $packages | wc -w)" ] ||
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends $packages
