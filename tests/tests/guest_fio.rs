//! fio in a guest: random writes with checksums over several queues and I/O threads, verified at once and by a full
//! read-back. Then the guest's view of each disk is compared with the image.

use integration::{Guest, Image, Scratch, ServerCommand};

/// A disk: options of its file, the I/O threads of its export, and the number of its queues.
type Disk = (&'static str, &'static str, u32);

const DIRECT: &str = "aio=io_uring,cache.direct=on";
const ONE: &str = "iothread=io0";
const TWO: &str = "iothread.0=io0,iothread.1=io1";

/// Writes of 4 to 64 KiB, by one job per queue, to one disk after the other.
fn fio(disks: &[Disk]) {
    let scratch = Scratch::new();
    let mut server = ServerCommand::new(&scratch).iothread("io0").iothread("io1");
    let mut images = Vec::new();
    for (name, (file, threads, queues)) in ('a'..).zip(disks) {
        let id = format!("vd{name}");
        let image = Image::filled(&scratch, &format!("{id}.img"), 20);
        server =
            server.file(&id, &image, file).export(&id, &format!("num-queues={queues},{threads}"));
        images.push(image);
    }
    let server = server.start();
    let (mut guest, mut job) = (Guest::new().queues(4).unsaid_queues(), String::new());
    for (name, (.., queues)) in ('a'..).zip(disks) {
        let disk = format!("vd{name}");
        guest = guest.disk_with(server.socket(&disk), &format!("num-queues={queues}"));
        job += &format!(
            "disk={disk}
            everywhere() {{
                verify --bsrange=4k-64k --size=4m --offset_increment=4m --numjobs={queues} $1
            }}
            [ $(ls -d /sys/block/$disk/mq/* | wc -l) = {queues} ]
            everywhere --do_verify=1
            everywhere --verify_only=1
            md5sum </dev/$disk\n"
        );
    }
    let lines = guest.run(&job);
    server.stop();
    let written: Vec<_> = images.iter().map(|image| format!("{}  -", image.md5())).collect();
    assert_eq!(lines, written, "the guest's view against the images");
}

#[test]
fn one_and_four_queues_and_the_thread_pool_through_the_page_cache() {
    fio(&[(DIRECT, ONE, 1), (DIRECT, TWO, 4), ("aio=threads", ONE, 1)]);
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn other_numbers_of_queues_and_threads_and_linux_aio() {
    fio(&[(DIRECT, ONE, 4), (DIRECT, TWO, 1), ("aio=native,cache.direct=on", TWO, 4)]);
}
