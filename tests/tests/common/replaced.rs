//! A guest that writes and reads back with checksums, while its daemon is replaced again and again: it sees no
//! error, and finds each block as it wrote it.

use integration::{Guest, Image, Scratch, Server, ServerCommand};

/// How often: as the environment's `variable` says; 20 times when it is not set.
pub fn times(variable: &str) -> usize {
    let times = std::env::var(variable).ok();
    times.map_or(20, |times| times.parse().unwrap_or_else(|_| panic!("{variable}: a number")))
}

/// How many requests pass before it is replaced: not the same number each time, so that it comes at any instant.
fn requests_before(time: usize) -> usize {
    [20, 150, 1, 70, 33, 400, 5][time % 7] + time
}

/// Which device the guest has.
#[derive(Clone, Copy)]
pub enum Device {
    Blk,
    Scsi,
}

/// Has the daemon under the guest's disk replaced that often. `replace` is given the daemon and how one is
/// started, and gives the one that serves from then on.
pub fn survives(
    guest: Guest,
    device: Device,
    queues: u32,
    times: usize,
    replace: impl Fn(Server, &dyn Fn() -> Server) -> Server,
) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let start = || {
        let command = ServerCommand::new(&scratch).iothread("io0").iothread("io1").file(
            "disk",
            &image,
            "aio=io_uring,cache.direct=on",
        );
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
    let job = format!(
        "disk={name}
        # Linux goes on before it has looked at what there is behind a SCSI controller.
        until [ -b /dev/$disk ]; do usleep 10000; done
        verify --do_verify=1
        checked_load {queues}
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
    let mut guest = guest.queues(queues).with_fio().boot(&job);
    for time in 0..times {
        guest.expect("how many?");
        guest.send(&requests_before(time).to_string());
        guest.expect("replace");
        server = replace(server, &start);
    }
    guest.expect("how many?");
    guest.send("0");
    let lines = guest.finish();
    server.stop();
    assert_eq!(lines.last(), Some(&format!("{}  -", image.md5())));
}
