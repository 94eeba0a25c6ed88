//! Firmware that boots a disk of a vfio-user export, without KVM. `scripts/setup-firmware.sh` makes the disk.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use serde_json::json;
use tempfile::TempDir;

use crate::guest::{TIME_LIMIT, peers_qemu, start};
use crate::program::repository;
use crate::{Image, Scratch};

/// What the machine begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    /// QEMU's BIOS, which boots GRUB from the first sectors.
    SeaBios,
    /// UEFI, which boots GRUB from the partition.
    Ovmf,
    /// U-Boot, which these commands are typed into.
    UBoot(&'static str),
}

/// A disk that firmware boots: Linux prints its command line and powers off.
pub fn boot_disk(scratch: &Scratch) -> Image {
    let disk = repository().join("target/guest/boot.img");
    assert!(disk.is_file(), "{} does not exist: run scripts/setup-firmware.sh", disk.display());
    let copy = scratch.path("boot.img");
    fs::copy(disk, &copy).expect("space for the disk");
    Image::existing(&copy)
}

fn installed(path: &str) -> String {
    assert!(Path::new(path).is_file(), "{path} does not exist: run scripts/setup-firmware.sh");
    path.to_owned()
}

impl Firmware {
    /// Boots from the disk behind a socket. Returns what the serial port has printed when the machine is off.
    ///
    /// # Panics
    ///
    /// If the machine does not power off in time.
    pub fn boot(self, socket: &Path) -> String {
        let dir = TempDir::with_prefix_in("ringmill-guest-", "/var/tmp").expect("a folder");
        let mut arguments = Vec::new();
        let mut add = |name: &str, value: String| arguments.extend([format!("-{name}"), value]);
        let mut machine = "q35";
        match self {
            Firmware::SeaBios => {}
            Firmware::Ovmf => {
                let variables = dir.path().join("variables");
                let empty = installed("/usr/share/OVMF/OVMF_VARS_4M.fd");
                fs::copy(empty, &variables).expect("space for variables");
                let code = installed("/usr/share/OVMF/OVMF_CODE_4M.fd");
                let flash = "if=pflash,format=raw";
                add("drive", format!("{flash},readonly=on,file={code}"));
                add("drive", format!("{flash},file={}", variables.display()));
            }
            Firmware::UBoot(_) => {
                // Debian's U-Boot has the device tree of this one.
                machine = "pc";
                add("bios", installed("/usr/lib/u-boot/qemu-x86/u-boot.rom"));
            }
        }
        add("machine", format!("{machine},memory-backend=ram"));
        add("accel", "tcg".into());
        add("cpu", "max".into());
        add("m", "512M".into());
        add("object", "memory-backend-memfd,id=ram,size=512M,share=on".into());
        let socket = json!({"type": "unix", "path": socket});
        add("device", json!({"driver": "vfio-user-pci", "socket": socket}).to_string());
        add("chardev", "stdio,id=console,signal=off".into());
        add("serial", "chardev:console".into());
        add("display", "none".into());
        arguments.extend(["-no-user-config", "-nodefaults", "-no-reboot"].map(String::from));

        let errors = dir.path().join("stderr");
        let stderr = File::create_new(&errors).expect("a new file");
        let (mut qemu, mut keys, console) = start(&peers_qemu(), &arguments, stderr);
        if let Firmware::UBoot(commands) = self {
            // QEMU keeps them until the serial port is read. The first ends the countdown; some are lost while U-Boot
            // sets the port up.
            let typed = [&"\n".repeat(64), commands].concat();
            keys.write_all(typed.as_bytes()).expect("QEMU reads");
        }
        let (mut text, deadline) = (String::new(), Instant::now() + TIME_LIMIT);
        while let Ok(line) =
            console.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            text.extend([line.as_str(), "\n"]);
        }
        let is_late = Instant::now() >= deadline;
        // Fails if QEMU has ended.
        let _ = qemu.kill();
        let status = qemu.wait().expect("QEMU is our child");
        let errors = fs::read_to_string(errors).expect("QEMU's stderr");
        let is_off = !is_late && text.contains("Power down");
        assert!(is_off, "{self:?}: QEMU ended with {status}\n{errors}\n{text}");
        text
    }
}
