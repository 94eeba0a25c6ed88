//! A guest writes and reads back with checksums, while its daemon is replaced repeatedly. The guest sees no error, and
//! finds each block as written.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use fastrand::Rng;
use integration::{Guest, Image, Scratch, Server, ServerCommand, tool};

/// Number of replacements: the environment's `variable`, or 20.
pub fn times(variable: &str) -> usize {
    number(variable).unwrap_or(20) as usize
}

fn number(variable: &str) -> Option<u64> {
    let number = std::env::var(variable).ok()?;
    Some(number.parse().unwrap_or_else(|_| panic!("{variable}: a number")))
}

/// Random numbers from a seed, which is printed: the environment's `RINGMILL_SEED`, or the time of day.
pub struct Random(RefCell<Rng>);

impl Random {
    pub fn new() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = since.expect("a time after 1970").as_micros() as u64;
        let seed = number("RINGMILL_SEED").unwrap_or(now);
        println!("RINGMILL_SEED={seed}");
        Random(RefCell::new(Rng::with_seed(seed)))
    }

    /// A number below `end`.
    pub fn below(&self, end: u64) -> u64 {
        self.0.borrow_mut().u64(..end)
    }

    /// Number of requests until the next replacement. One is as likely as hundreds, so that replacements also hit a new
    /// connection, and full queues.
    fn requests(&self) -> u64 {
        1 + self.below(1 << (1 + self.below(9)))
    }
}

/// The guest's device.
#[derive(Clone, Copy)]
pub enum Device {
    Blk,
    Scsi,
}

/// The image of the disk.
#[derive(Clone, Copy, PartialEq)]
pub enum Format {
    /// All written before, accessed with O_DIRECT.
    Raw,
    /// The same, with some slower requests, so that requests never complete in order. The ring alone then does not show
    /// which requests are in flight.
    Reordered,
    /// Without allocated clusters, and too large for the load to reach its end: writes change metadata, which a killed
    /// daemon leaves in its journal.
    Qcow2,
}

impl Format {
    /// The guest's disk in MiB.
    fn mib(self, times: usize) -> u64 {
        match self {
            Format::Raw | Format::Reordered => 32,
            Format::Qcow2 => 32 + 8 * times as u64,
        }
    }

    fn make(self, scratch: &Scratch, mib: u64) -> Image {
        match self {
            Format::Raw | Format::Reordered => Image::filled(scratch, "disk.img", mib),
            Format::Qcow2 => {
                let path = scratch.path("disk.qcow2");
                qemu_img(&["create", "-f", "qcow2"], &[&path], &[&format!("{mib}M")]);
                Image::existing(&path)
            }
        }
    }

    fn blockdev(self, image: &Image) -> String {
        let file = |prefix: &str| {
            let path = image.path().display();
            format!(
                "{prefix}driver=file,{prefix}filename={path},{prefix}aio=io_uring,\
                 {prefix}cache.direct=on"
            )
        };
        match self {
            Format::Raw => format!("node-name=disk,{}", file("")),
            Format::Reordered => {
                let rule = "inject-error.0";
                format!(
                    "driver=blkdebug,node-name=disk,{},{rule}.event=none,{rule}.errno=0,\
                     {rule}.delay-ns=4000000,{rule}.probability-ppm=300000",
                    file("image.")
                )
            }
            Format::Qcow2 => format!("driver=qcow2,node-name=disk,{}", file("file.")),
        }
    }

    /// Whether a daemon has left metadata in its journal: bit 0 of `incompatible_features`.
    fn is_unclosed(self, image: &Image) -> bool {
        self == Format::Qcow2 && image.read(79, 1)[0] & 1 != 0
    }

    /// The MD5 sum of the disk's contents.
    fn md5(self, scratch: &Scratch, image: &Image) -> String {
        match self {
            Format::Raw | Format::Reordered => image.md5(),
            Format::Qcow2 => {
                qemu_img(&["check", "-f", "qcow2"], &[image.path()], &[]);
                let raw = scratch.path("disk.raw");
                let convert = ["convert", "-f", "qcow2", "-O", "raw"];
                qemu_img(&convert, &[image.path(), &raw], &[]);
                Image::existing(&raw).md5()
            }
        }
    }
}

fn qemu_img(arguments: &[&str], files: &[&Path], more: &[&str]) {
    let mut command = Command::new(tool("qemu-img"));
    let done = command.args(arguments).args(files).args(more).output().expect("qemu-img runs");
    assert!(done.status.success(), "{done:?}");
}

/// Replaces the daemon under the guest's disk that often. `replace` gets the daemon and a function that starts one, and
/// returns the daemon that serves from then on.
pub fn survives(
    guest: Guest,
    (device, format): (Device, Format),
    queues: u32,
    times: usize,
    random: &Random,
    replace: impl Fn(Server, &dyn Fn() -> Server) -> Server,
) {
    let scratch = Scratch::new();
    let mib = format.mib(times);
    let image = format.make(&scratch, mib);
    let unclosed = Cell::new(0);
    let start = || {
        unclosed.set(unclosed.get() + usize::from(format.is_unclosed(&image)));
        let blockdev = format.blockdev(&image);
        let command = ServerCommand::new(&scratch).iothread("io0").iothread("io1");
        let command = command.arg("--blockdev").arg(blockdev);
        let options = format!("num-queues={queues},iothread.0=io0,iothread.1=io1");
        match device {
            Device::Blk => command.export("disk", &options).start(),
            Device::Scsi => command.export_scsi("disk", &["disk"], &options).start(),
        }
    };
    let name = match device {
        Device::Blk => "vda",
        Device::Scsi => "sda",
    };
    let of_each_job = match format {
        Format::Raw | Format::Reordered => 4,
        Format::Qcow2 => (mib - 16) / u64::from(queues),
    };
    let job = format!(
        "disk={name}
        # Linux goes on before it has looked at what there is behind a SCSI controller.
        until [ -b /dev/$disk ]; do usleep 10000; done
        verify --do_verify=1
        checked_load {queues} --offset_increment={of_each_job}m --size={of_each_job}m
        while echo 'how many?' && read -r requests && [ $requests != 0 ]; do
            wait_for_requests $requests
            echo replace
        done
        end_checked_load
        verify --verify_only=1
        md5sum </dev/$disk
        dmesg | grep -E \"I/O error|$disk.*(timeout|reset)\" || true"
    );
    let mut server = start();
    let guest = match device {
        Device::Blk => guest.disk(server.socket("disk")),
        Device::Scsi => guest.scsi(server.socket("disk")),
    };
    let mut guest = guest.queues(queues).boot(&job);
    for _ in 0..times {
        guest.expect("how many?");
        guest.send(&random.requests().to_string());
        guest.expect("replace");
        server = replace(server, &start);
    }
    guest.expect("how many?");
    guest.send("0");
    let lines = guest.finish();
    server.stop();
    assert_eq!(lines.last(), Some(&format!("{}  -", format.md5(&scratch, &image))));
    // Otherwise the journal was empty at some kill.
    assert!(format != Format::Qcow2 || unclosed.get() == times, "{unclosed:?} of {times}");
}
