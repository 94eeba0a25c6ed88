//! Memory is plugged into the guest and unplugged under load. The daemon takes over the new memory table while requests
//! are in flight, and serves requests whose buffers are in the new memory. After the guest's end the daemon has the
//! same resources as before.

use crate::common;

use common::footprint::Alone;
use integration::{Boot, Guest, Image, Qmp, Scratch, Server, ServerCommand, eventually};
use serde_json::json;

/// Functions of the jobs: the number of online memory blocks, and a load that runs until /tmp/enough exists.
const FUNCTIONS: &str = "
    online() { cat /sys/devices/system/memory/memory*/state | grep -cx online; }
    start_load() {
        (while [ ! -e /tmp/enough ]; do verify --invalidate=0 --do_verify=1; done) &
        load=$!
        wait_for_requests 500
    }
    stop_load() {
        touch /tmp/enough
        wait $load
    }";

/// The guest's first memory is below 4 GiB, the new memory above. Linux allocates its page cache from the upper memory
/// first, so the buffered copy that follows uses it.
const PLUG: &str = "
    free() { awk '/zone  *Normal/ { getline; print $3 }' /proc/zoneinfo; }
    echo online_kernel >/sys/devices/system/memory/auto_online_blocks
    # Keeps the page cache alive when fio closes the disk.
    exec 3</dev/vda
    start_load
    blocks=$(($(online) + 2))
    echo ready
    until [ $(online) = $blocks ]; do sleep 0.05; done
    before=$(free)
    dd if=/dev/vda of=/dev/vda bs=1M skip=32 seek=48 count=16 conv=notrunc,fsync 2>/dev/null
    [ $(free) -lt $((before - 4000)) ]
    stop_load
    md5sum </dev/vda";

/// Linux can only offline memory that is online as movable. It does so when asked to unplug the memory.
const UNPLUG: &str = "
    echo online_movable >/sys/devices/system/memory/auto_online_blocks
    start_load
    for round in 1 2; do
        blocks=$(online)
        echo plug
        until [ $(online) = $((blocks + 2)) ]; do sleep 0.05; done
        wait_for_requests 500
        echo unplug
        until [ $(online) = $blocks ]; do sleep 0.05; done
        wait_for_requests 500
    done
    stop_load
    md5sum </dev/vda";

struct Machine {
    guest: Boot,
    qmp: Qmp,
    server: Server,
    /// The server's resources before the guest.
    alone: Alone,
    image: Image,
    scratch: Scratch,
}

fn boot(job: &str, export_options: &str) -> Machine {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 64);
    let server = ServerCommand::new(&scratch)
        .iothread("io0")
        .file("disk", &image, "aio=io_uring,cache.direct=on")
        .export("disk", &format!("num-queues=2,iothread=io0{export_options}"))
        .start();
    let alone = Alone::of(&server);
    let guest = Guest::new().disk(server.socket("disk")).queues(2).single_threaded();
    let guest = guest.boot(&[FUNCTIONS, job].concat());
    let qmp = guest.qmp();
    Machine { guest, qmp, server, alone, image, scratch }
}

impl Machine {
    fn plug(&mut self) {
        let memory = json!({
            "qom-type": "memory-backend-memfd", "id": "more", "size": 256 << 20, "share": true
        });
        self.qmp.execute("object-add", memory);
        let dimm = json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" });
        self.qmp.execute("device_add", dimm);
    }

    fn unplug(&mut self) {
        self.qmp.execute("device_del", json!({ "id": "dimm" }));
        self.qmp.wait_for("DEVICE_DELETED");
        self.qmp.execute("object-del", json!({ "id": "more" }));
    }

    /// The disk's contents at the end, compared between guest and host.
    fn finish(self) -> (Image, Scratch) {
        let lines = self.guest.finish();
        self.alone.again(&self.server);
        self.server.stop();
        assert_eq!(lines.last(), Some(&format!("{}  -", self.image.md5())));
        (self.image, self.scratch)
    }
}

#[test]
fn memory_is_plugged_in_under_load() {
    plug_in("");
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn memory_is_taken_out_under_load() {
    take_out("");
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn memory_is_plugged_in_under_load_and_pinned() {
    plug_in(",pin-memory=on");
}

#[test]
fn pinned_memory_is_taken_out_under_load() {
    take_out(",pin-memory=on");
}

fn plug_in(export_options: &str) {
    let mut machine = boot(PLUG, export_options);
    machine.guest.expect("ready");
    let pinned = machine.server.pinned_kib();
    assert_eq!(pinned > 0, !export_options.is_empty());
    machine.plug();
    if pinned > 0 {
        let more = 256 << 10;
        eventually("the new memory to be pinned", || {
            (machine.server.pinned_kib() == pinned + more).then_some(())
        });
    }
    let (image, _scratch) = machine.finish();
    assert_eq!(image.read(32 << 20, 16 << 20), image.read(48 << 20, 16 << 20));
}

fn take_out(export_options: &str) {
    let mut machine = boot(UNPLUG, export_options);
    for _ in 1..=2 {
        machine.guest.expect("plug");
        let mappings = machine.server.guest_mappings();
        let pinned = machine.server.pinned_kib();
        machine.plug();
        machine.guest.expect("unplug");
        machine.unplug();
        eventually("the memory to be unmapped", || {
            (machine.server.guest_mappings() == mappings).then_some(())
        });
        eventually("the memory to be unpinned, and all other pinned", || {
            (machine.server.pinned_kib() == pinned).then_some(())
        });
    }
    machine.finish();
}
