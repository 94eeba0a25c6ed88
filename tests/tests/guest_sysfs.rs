//! What the guest's kernel says of the disk.

use integration::{Guest, Image, Scratch, ServerCommand};

const JOB: &str = "
    cd /sys/block/vda
    for file in size ro serial mq queue/logical_block_size queue/write_cache \
        queue/discard_max_bytes queue/write_zeroes_max_bytes; do
        if [ -d $file ]; then echo $file $(ls $file | wc -l); else echo $file $(cat $file); fi
    done";

fn sysfs(export_options: &str, queues: u32) -> Vec<String> {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "discard=unmap")
        .export("disk", export_options)
        .start();
    let lines = Guest::new().disk(server.socket("disk")).queues(queues).run(JOB);
    server.stop();
    lines
}

fn number(lines: &[String], file: &str) -> u64 {
    let line = lines.iter().find_map(|line| line.strip_prefix(file));
    line.unwrap_or_else(|| panic!("no {file} in {lines:?}")).trim().parse().expect("a number")
}

#[test]
fn size_features_and_limits() {
    let lines = sysfs("", 1);
    assert_eq!(number(&lines, "size"), 32 << 11);
    assert_eq!(number(&lines, "ro"), 0);
    assert_eq!(number(&lines, "mq"), 1);
    assert_eq!(number(&lines, "queue/logical_block_size"), 512);
    assert!(number(&lines, "queue/discard_max_bytes") >= 32 << 20, "{lines:?}");
    assert!(number(&lines, "queue/write_zeroes_max_bytes") >= 32 << 20, "{lines:?}");
    assert!(lines.contains(&"queue/write_cache write back".to_owned()), "{lines:?}");
    let serial = lines.iter().find_map(|line| line.strip_prefix("serial "));
    assert!(serial.is_some_and(|serial| !serial.is_empty()), "{lines:?}");
}

#[test]
fn block_size_and_queues() {
    let lines = sysfs("logical-block-size=4096,num-queues=4", 4);
    assert_eq!(number(&lines, "size"), 32 << 11);
    assert_eq!(number(&lines, "mq"), 4);
    assert_eq!(number(&lines, "queue/logical_block_size"), 4096);
}

#[test]
fn a_read_only_export() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 8);
    let before = image.md5();
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "read-only=on")
        .export("disk", "writable=off")
        .start();
    let lines = Guest::new().disk(server.socket("disk")).run(
        "cat /sys/block/vda/ro
        if dd if=/dev/zero of=/dev/vda bs=4k count=1 conv=fsync 2>/dev/null; then exit 1; fi
        md5sum </dev/vda",
    );
    server.stop();
    assert_eq!(lines, ["1".to_owned(), format!("{before}  -")]);
    assert_eq!(image.md5(), before);
}
