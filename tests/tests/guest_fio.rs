//! fio in a guest: random writes with checksums over several queues and I/O threads, verified at once and by a full
//! read-back. Then the guest's view of the disk is compared with the image.

use integration::{Guest, Image, Scratch, ServerCommand};

/// Writes of 4 to 64 KiB, by one job per queue.
fn job(queues: u32) -> String {
    format!(
        "everywhere() {{
            verify --bsrange=4k-64k --size=4m --offset_increment=4m --numjobs={queues} $1
        }}
        [ $(ls -d /sys/block/vda/mq/* | wc -l) = {queues} ]
        everywhere --do_verify=1
        everywhere --verify_only=1
        md5sum </dev/vda"
    )
}

fn fio(iothreads: &[&str], binding: &str, file_options: &str, queues: u32) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 64);
    let mut server = ServerCommand::new(&scratch).file("disk", &image, file_options);
    for id in iothreads {
        server = server.iothread(id);
    }
    let server = server.export("disk", &format!("num-queues={queues},{binding}")).start();
    let lines =
        Guest::new().disk(server.socket("disk")).queues(queues).with_fio().run(&job(queues));
    server.stop();
    assert_eq!(lines, [format!("{}  -", image.md5())], "the guest's view against the image");
}

#[test]
fn one_queue_on_one_iothread() {
    fio(&["io0"], "iothread=io0", "aio=io_uring,cache.direct=on", 1);
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn four_queues_on_one_iothread() {
    fio(&["io0"], "iothread=io0", "aio=io_uring,cache.direct=on", 4);
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn one_queue_on_two_iothreads() {
    let binding = "iothread.0=io0,iothread.1=io1";
    fio(&["io0", "io1"], binding, "aio=io_uring,cache.direct=on", 1);
}

#[test]
fn four_queues_on_two_iothreads() {
    let binding = "iothread.0=io0,iothread.1=io1";
    fio(&["io0", "io1"], binding, "aio=io_uring,cache.direct=on", 4);
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn four_queues_on_two_iothreads_by_linux_aio() {
    let binding = "iothread.0=io0,iothread.1=io1";
    fio(&["io0", "io1"], binding, "aio=native,cache.direct=on", 4);
}

#[test]
fn on_the_thread_pool_through_the_page_cache() {
    fio(&["io0"], "iothread=io0", "aio=threads", 1);
}
