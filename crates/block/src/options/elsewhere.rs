//! Drivers that QEMU has and ringmill lacks, with an alternative for each.

use ::options::OptionError;

/// The drivers, grouped by their alternative.
static ELSEWHERE: &[(&[&str], &str)] = &[
    (
        &["qcow", "vmdk", "vdi", "vpc", "vhdx", "qed", "parallels", "bochs", "cloop", "dmg"],
        "Convert the image: qemu-img convert -O qcow2 <image> <image>.qcow2",
    ),
    (
        &["ftp", "ftps"],
        "nbdkit serves such a file: nbdkit -r -U /run/file.sock curl url=<url>; then driver nbd with \
         server.type=unix,server.path=/run/file.sock.",
    ),
    (
        &["ssh"],
        "nbdkit serves such a file: nbdkit -U /run/file.sock ssh host=<host> path=<path>; then driver \
         nbd with server.type=unix,server.path=/run/file.sock.",
    ),
    (
        &["vvfat"],
        "nbdkit serves such a disk: nbdkit -r -U /run/fat.sock floppy dir=<folder>; then driver nbd with \
         server.type=unix,server.path=/run/fat.sock.",
    ),
    (&["iscsi"], "'iscsiadm --login' makes a block device of it, for driver host_device."),
    (&["nfs", "gluster"], "Mount the file system, and use driver file."),
    (
        &["host_cdrom"],
        "Use driver host_device with read-only=on for the medium that is in the drive.",
    ),
    (&["io_uring"], "Use driver file or host_device with aio=io_uring."),
    (
        &["nvme", "nvme-io_uring", "virtio-blk-vfio-pci", "virtio-blk-vhost-vdpa"],
        "Leave the device to the kernel's own driver, and use driver host_device with its block device.",
    ),
    (
        &["virtio-blk-vhost-user"],
        "Have the other program serve the disk over NBD, and use driver nbd.",
    ),
    (
        &["quorum"],
        "'mdadm --create' makes one block device of several disks, for driver host_device.",
    ),
    (&["replication"], "DRBD makes a block device that is replicated, for driver host_device."),
    (
        &["blklogwrites"],
        "The kernel's dm-log-writes makes a block device that logs, for host_device.",
    ),
    (&["blkreplay", "blkverify"], "It is for tests of QEMU itself. blkdebug is there."),
];

/// Returns the error for a driver that only QEMU has.
pub(super) fn refusal(name: &str) -> Option<OptionError> {
    let (_, around) = ELSEWHERE.iter().find(|(names, _)| names.contains(&name))?;
    Some(OptionError::not_yet(format!("Driver '{name}'")).hint(*around))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers;

    /// The values of `BlockdevDriver` in `query-qmp-schema` of QEMU 11.1.
    const QEMU: &str = "blkdebug blklogwrites blkreplay blkverify bochs cloop compress \
        copy-before-write copy-on-read dmg file ftp ftps host_cdrom host_device http https io_uring \
        iscsi luks nbd nfs null-aio null-co nvme nvme-io_uring parallels preallocate qcow qcow2 qed \
        quorum raw rbd replication snapshot-access ssh throttle vdi vhdx virtio-blk-vfio-pci \
        virtio-blk-vhost-user virtio-blk-vhost-vdpa vmdk vpc vvfat";

    #[test]
    fn each_driver_of_qemu_is_there_or_has_a_way_around() {
        for name in QEMU.split_whitespace() {
            let is_there = drivers::all().any(|driver| driver.name == name);
            assert_ne!(is_there, refusal(name).is_some(), "{name}");
        }
        assert_eq!(refusal("vmdkk"), None);
    }
}
