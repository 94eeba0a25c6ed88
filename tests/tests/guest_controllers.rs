//! Three exports beside each other, and beside QEMU's own NVMe and AHCI controllers, in one guest: vfio-user-nvme,
//! vfio-user-ahci and vhost-user-blk. `.ci/nightly` has this. The guest is without KVM, so that only ratios of its figures mean something.
//!
//! `RINGMILL_CONTROLLERS_JSON=FILE` writes them to a file.

use std::collections::BTreeMap;
use std::{env, fs};

use integration::{Guest, Image, Scratch, ServerCommand};
use serde_json::{Value, json};

/// The disks, as the guest sees them.
const DISKS: [&str; 5] =
    ["vfio-user-nvme", "vfio-user-ahci", "vhost-user-blk", "qemu-nvme", "qemu-ahci"];
const AHCI: usize = 1;
const VIRTIO_BLK: usize = 2;
const OWN_AHCI: usize = 4;
/// Rounds, in which the disks take turns.
const ROUNDS: usize = 3;
const MIB: u64 = 128;

/// Each load on each disk in turn. `batch` and `each` are the published workload, 128 MiB in batches of 16 reads of
/// 128 KiB: with a pause of 1 ms after each batch, and after each completion.
const JOB: &str = r#"
    for part in /sys/block/nvme*n1; do
        name=$(basename $part)
        case $(cat $part/device/model) in
            ringmill*) nvme=$name ;;
            *) own=$name ;;
        esac
    done
    for part in /sys/block/sd*; do
        name=$(basename $part)
        case $(cat $part/device/model) in
            ringmill*) ahci=$name ;;
            *) own_ahci=$name ;;
        esac
    done
    # One disk is busy at a time.
    interrupts() {
        awk '/nvme|ahci|-req/ { sum += $2 + $3 } END { print sum + 0 }' /proc/interrupts
    }
    measure() {
        load=$1 disk=$2
        shift 2
        before=$(interrupts)
        fio --minimal --name=job --filename=/dev/$disk --direct=1 --ioengine=libaio --size=128m "$@" >/tmp/terse 2>&1 || {
            cat /tmp/terse
            exit 1
        }
        tail -n 1 /tmp/terse | awk -F ';' -v name=$disk -v load=$load -v interrupts=$(($(interrupts) - before)) '{
            read = $6 > 0
            first = read ? 18 : 59
            for (i = first; i < first + 20; i++) {
                if ($i ~ /^50.0/) { split($i, p50, "=") }
                if ($i ~ /^99.0/) { split($i, p99, "=") }
            }
            print load, name, read ? $8 : $49, p50[2], p99[2], read ? $9 : $50, interrupts
        }'
    }
    pausing() {
        disk=$1 load=$2 blocks=$3
        measure $load $disk --rw=read --bs=128k --iodepth=16 --iodepth_low=1 --iodepth_batch=16 \
            --iodepth_batch_complete_min=16 --iodepth_batch_complete_max=16 --thinktime=1000 --thinktime_blocks=$blocks
    }
    echo names $nvme $ahci vda $own $own_ahci
    echo 'how many rounds?'
    read -r rounds
    for round in $(seq $rounds); do
        disks="$nvme $ahci vda $own $own_ahci"
        [ $((round % 2)) = 1 ] || disks="$own_ahci $own vda $ahci $nvme"
        for name in $disks; do
            measure randread-1 $name --rw=randread --bs=4k --iodepth=1 --time_based --runtime=2
            measure randread-32 $name --rw=randread --bs=4k --iodepth=32 --time_based --runtime=2
            measure randwrite-32 $name --rw=randwrite --bs=4k --iodepth=32 --time_based --runtime=2
            pausing $name batch 16
            pausing $name each 1
        done
    done"#;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn controllers_beside_each_other() {
    let scratch = Scratch::new();
    let images = DISKS.map(|name| Image::empty(&scratch, &format!("{name}.img"), MIB));
    for image in &images {
        fs::write(image.path(), vec![0x5a; (MIB << 20) as usize]).expect("space for the image");
    }
    let sockets = DISKS.map(|name| scratch.path(&format!("{name}.sock")));
    let mut command = ServerCommand::new(&scratch);
    for (number, name) in DISKS.iter().enumerate().take(3) {
        let (thread, node) = (format!("iothread,id=io{number}"), format!("disk{number}"));
        let export = format!(
            "type={name},id=export{number},node-name={node},addr.type=unix,addr.path={},writable=on,iothread=io{number}",
            sockets[number].display()
        );
        command = command
            .args(["--object", &thread])
            .file(&node, &images[number], "cache.direct=on,aio=io_uring")
            .args(["--export", &export]);
    }
    let server = command.start();
    let [own, own_ahci] = [("own", 3), ("own-ahci", 4)].map(|(node, number)| {
        let path = images[number].path().display();
        format!("driver=file,node-name={node},filename={path},cache.direct=on,aio=io_uring")
    });
    let [nvme, ahci, blk, ..] = sockets;
    let mut guest = Guest::new()
        .vfio_user(nvme)
        .vfio_user(ahci)
        .disk(blk)
        .time_limit(ROUNDS as u32 * 300)
        .with_arguments(&["-blockdev", &own, "-device", "nvme,drive=own,serial=own"])
        // The machine has an AHCI controller of its own.
        .with_arguments(&["-blockdev", &own_ahci, "-device", "ide-hd,drive=own-ahci,bus=ide.0"])
        .boot(JOB);
    let names = guest.line();
    let names: Vec<&str> = names.split_whitespace().skip(1).collect();
    guest.expect("how many rounds?");
    guest.send(&ROUNDS.to_string());
    let lines = guest.finish();
    server.stop();

    // By load and disk: the figures of each round.
    let mut figures: BTreeMap<(&str, usize), Vec<[f64; 5]>> = BTreeMap::new();
    for line in &lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [load, name, values @ ..] = words.as_slice() else { continue };
        let Some(disk) = names.iter().position(|known| known == name) else { continue };
        if values.len() != 5 {
            continue;
        }
        let values = [0, 1, 2, 3, 4].map(|at| values[at].parse().expect("a number"));
        figures.entry((*load, disk)).or_default().push(values);
    }
    assert_eq!(figures.len(), 5 * DISKS.len(), "{lines:?}");
    let mut rows = Vec::new();
    for ((load, disk), rounds) in &figures {
        assert_eq!(rounds.len(), ROUNDS, "{load} on {}", DISKS[*disk]);
        let of = |at: usize| median(rounds.iter().map(|round| round[at]).collect());
        let (iops, p50, p99, ms, interrupts) = (of(0), of(1), of(2), of(3), of(4));
        println!(
            "{load:13} {:15} {iops:8} IOPS  p50 {p50:6} us  p99 {p99:6} us  {ms:6} ms  {interrupts:6} interrupts",
            DISKS[*disk]
        );
        rows.push(json!({
            "load": load, "disk": DISKS[*disk], "iops": iops, "p50_us": p50, "p99_us": p99, "ms": ms, "interrupts": interrupts,
            "rounds_ms": rounds.iter().map(|round| round[3]).collect::<Vec<_>>(),
        }));
    }
    if let Some(file) = env::var_os("RINGMILL_CONTROLLERS_JSON") {
        fs::write(file, format!("{:#}\n", Value::from(rows))).expect("the file is written");
    }
    for load in ["batch", "each"] {
        let ms = |disk| median(figures[&(load, disk)].iter().map(|round| round[3]).collect());
        let (ahci, blk, own) = (ms(AHCI), ms(VIRTIO_BLK), ms(OWN_AHCI));
        println!("{load}: AHCI took {:.3} of the time of virtio-blk", ahci / blk);
        println!("{load}: QEMU's own AHCI took {:.3} of it", own / blk);
        // A wake-up that is missing makes this workload 20 times as long.
        assert!(ahci < 2.0 * blk, "{load}: AHCI took {ahci} ms, virtio-blk {blk} ms");
    }
}
