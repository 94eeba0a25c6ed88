//! Firmware and boot loaders boot from disks of vfio-user exports. `.ci/nightly` has these: they take QEMU 11, firmware and a
//! disk (`scripts/setup-vfio-user.sh`, `scripts/setup-firmware.sh`).
//!
//! Firmware polls: it enables no interrupts, writes no doorbells to memory, and uses queues of few entries.

use integration::{Firmware, Scratch, ServerCommand, boot_disk};

/// Boots from a disk behind an export of this type. The kernel's command line says what has loaded the kernel; the kernel
/// verifies that it is complete, and the checksum of the initramfs.
fn boots(export_type: &str, firmware: Firmware, expected: &[&str]) {
    let scratch = Scratch::new();
    let image = boot_disk(&scratch);
    let socket = scratch.path("pci.sock");
    let export = format!(
        "type={export_type},id=pci,node-name=disk,addr.type=unix,addr.path={},writable=on",
        socket.display()
    );
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "discard=unmap")
        .args(["--export", &export])
        .start();
    let console = firmware.boot(&socket);
    server.stop();
    for text in expected {
        assert!(console.contains(text), "no {text:?} in: {console}");
    }
}

/// Loads the initramfs above the memory that the kernel unpacks itself to.
macro_rules! u_boot {
    ($scan:literal, $disk:literal) => {
        concat!(
            "pci enum\n",
            $scan,
            "\nload ",
            $disk,
            " 10000000 /initramfs\nsetenv size ${filesize}\nload ",
            $disk,
            " ${kernel_addr_r} /vmlinuz\n",
            "setenv bootargs console=ttyS0 quiet panic=-1 no_timer_check booted_by=u-boot\n",
            "zboot ${kernel_addr_r} 0 10000000 ${size}\n"
        )
    };
}

const LINUX_BY_BIOS: &[&str] = &["GRUB on pc", "no_timer_check booted_by=grub-pc"];
const LINUX_BY_EFI: &[&str] = &["GRUB on efi", "no_timer_check booted_by=grub-efi"];
const LINUX_BY_U_BOOT: &[&str] = &["bytes read in", "no_timer_check booted_by=u-boot"];

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn seabios_and_grub_boot_from_nvme() {
    boots("vfio-user-nvme", Firmware::SeaBios, LINUX_BY_BIOS);
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn seabios_and_grub_boot_from_ahci() {
    boots("vfio-user-ahci", Firmware::SeaBios, LINUX_BY_BIOS);
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn ovmf_and_grub_boot_from_nvme() {
    boots("vfio-user-nvme", Firmware::Ovmf, LINUX_BY_EFI);
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn ovmf_and_grub_boot_from_ahci() {
    boots("vfio-user-ahci", Firmware::Ovmf, LINUX_BY_EFI);
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn u_boot_boots_from_nvme() {
    let commands = u_boot!("nvme scan", "nvme 0:1");
    boots("vfio-user-nvme", Firmware::UBoot(commands), LINUX_BY_U_BOOT);
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn u_boot_boots_from_ahci() {
    let commands = u_boot!("scsi scan", "scsi 0:1");
    boots("vfio-user-ahci", Firmware::UBoot(commands), LINUX_BY_U_BOOT);
}
