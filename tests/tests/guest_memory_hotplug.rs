//! Memory is plugged into the guest under load: the daemon takes up the new memory table and serves requests
//! whose buffers are in the new memory, while others are in flight.

use integration::{Guest, Image, Scratch, ServerCommand};
use serde_json::json;

/// The guest's first memory is all below 4 GiB, the new memory above, which is where Linux takes its page cache
/// from first: the buffered copy that follows runs through it.
const JOB: &str = "
    online() { cat /sys/devices/system/memory/memory*/state | grep -cx online; }
    free() { awk '/zone  *Normal/ { getline; print $3 }' /proc/zoneinfo; }
    echo online_kernel >/sys/devices/system/memory/auto_online_blocks
    # Keeps the page cache alive when fio closes the disk.
    exec 3</dev/vda
    (while [ ! -e /tmp/enough ]; do verify --invalidate=0 --do_verify=1; done) &
    wait_for_requests 500
    blocks=$(($(online) + 2))
    echo ready
    until [ $(online) = $blocks ]; do :; done
    before=$(free)
    dd if=/dev/vda of=/dev/vda bs=1M skip=32 seek=48 count=16 conv=notrunc,fsync 2>/dev/null
    [ $(free) -lt $((before - 4000)) ]
    touch /tmp/enough
    wait $!
    md5sum </dev/vda";

#[test]
fn memory_is_plugged_in_under_load() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 64);
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "aio=io_uring,cache.direct=on")
        .export("disk", "num-queues=2")
        .start();
    let mut guest = Guest::new().disk(server.socket("disk")).queues(2).with_fio().boot(JOB);
    guest.expect("ready");
    let mut qmp = guest.qmp();
    let memory = json!({
        "qom-type": "memory-backend-memfd", "id": "more", "size": 256 << 20, "share": true
    });
    qmp.execute("object-add", memory);
    let dimm = json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" });
    qmp.execute("device_add", dimm);
    let lines = guest.finish();
    server.stop();
    assert_eq!(lines.last(), Some(&format!("{}  -", image.md5())));
    assert_eq!(image.read(32 << 20, 16 << 20), image.read(48 << 20, 16 << 20));
}
