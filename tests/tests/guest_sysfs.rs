//! What the guest's kernel says of disks.

use integration::{Guest, Image, Scratch, ServerCommand};

const JOB: &str = "
    for disk in vda vdb; do
        cd /sys/block/$disk
        for file in size ro serial mq queue/logical_block_size queue/write_cache \
            queue/discard_max_bytes queue/write_zeroes_max_bytes; do
            if [ -d $file ]; then echo $disk $file $(ls $file | wc -l); else echo $disk $file $(cat $file); fi
        done
    done
    cat /sys/block/vdc/ro
    if dd if=/dev/zero of=/dev/vdc bs=4k count=1 conv=fsync 2>/dev/null; then exit 1; fi
    md5sum </dev/vdc";

fn text<'a>(lines: &'a [String], file: &str) -> &'a str {
    let line = lines.iter().find_map(|line| line.strip_prefix(file));
    line.unwrap_or_else(|| panic!("no {file} in {lines:?}")).trim()
}

#[test]
fn size_features_limits_and_a_read_only_export() {
    let scratch = Scratch::new();
    let image = |name, mib| Image::filled(&scratch, name, mib);
    let (plain, large_blocks, fixed) = (image("a", 32), image("b", 32), image("c", 8));
    let before = fixed.md5();
    let server = ServerCommand::new(&scratch)
        .file("plain", &plain, "discard=unmap")
        .export("plain", "")
        .file("large", &large_blocks, "discard=unmap")
        .export("large", "logical-block-size=4096,num-queues=4")
        .file("fixed", &fixed, "read-only=on")
        .export("fixed", "writable=off")
        .start();
    let lines = Guest::new()
        .queues(4)
        .unsaid_queues()
        .disk_with(server.socket("plain"), "num-queues=1")
        .disk_with(server.socket("large"), "num-queues=4")
        .disk_with(server.socket("fixed"), "num-queues=1")
        .run(JOB);
    server.stop();
    let number = |file| text(&lines, file).parse::<u64>().expect("a number");

    assert_eq!(number("vda size"), 32 << 11);
    assert_eq!(number("vda ro"), 0);
    assert_eq!(number("vda mq"), 1);
    assert_eq!(number("vda queue/logical_block_size"), 512);
    assert!(number("vda queue/discard_max_bytes") >= 32 << 20, "{lines:?}");
    assert!(number("vda queue/write_zeroes_max_bytes") >= 32 << 20, "{lines:?}");
    assert_eq!(text(&lines, "vda queue/write_cache"), "write back");
    assert!(!text(&lines, "vda serial").is_empty(), "{lines:?}");

    assert_eq!(number("vdb size"), 32 << 11);
    assert_eq!(number("vdb mq"), 4);
    assert_eq!(number("vdb queue/logical_block_size"), 4096);

    assert_eq!(lines[lines.len() - 2..], ["1".to_owned(), format!("{before}  -")]);
    assert_eq!(fixed.md5(), before);
}
