//! Discard and write-zeroes from a guest: what is given back is really given back, and nothing else.

use integration::{Guest, Image, Scratch, ServerCommand, pattern};

const MIB: u64 = 1 << 20;

/// Fails unless the image holds the pattern that it was made with, but zeroes in the `zeroed` ranges of MiB.
fn assert_contents(image: &Image, zeroed: &[(u64, u64)]) {
    for mib in 0..64 {
        let data = image.read(mib * MIB, MIB as usize);
        if zeroed.iter().any(|&(from, len)| (from..from + len).contains(&mib)) {
            assert!(data.iter().all(|&byte| byte == 0), "MiB {mib} is not zero");
            continue;
        }
        for (at, block) in (0..).zip(data.chunks_exact(pattern::BLOCK)) {
            assert_eq!(pattern::generation(mib * (MIB / 4096) + at, block), Ok(0));
        }
    }
}

/// A disk: the option of its file, what is done to it, the MiB that are zeroes afterwards, and by how many MiB the image
/// then takes up less space.
type Disk = (&'static str, &'static str, &'static [(u64, u64)], i64);

/// A discard that gives space back, one that is ignored, zeroes that keep their space, and holes.
const DISKS: [Disk; 4] = [
    ("discard=unmap", "/bin/blkdiscard -o $((8 << 20)) -l $((16 << 20)) $disk", &[(8, 16)], 16),
    ("discard=ignore", "/bin/blkdiscard -o $((8 << 20)) -l $((16 << 20)) $disk", &[], 0),
    (
        "discard=unmap",
        "/bin/blkdiscard -z -o $((4 << 20)) -l $((4 << 20)) $disk
        /bin/fallocate -z -o $((32 << 20)) -l $((8 << 20)) $disk
        head -c $((4 << 20)) /dev/zero >/tmp/zeroes
        dd if=$disk bs=1M skip=4 count=4 iflag=direct 2>/dev/null | cmp - /tmp/zeroes",
        &[(4, 4), (32, 8)],
        0,
    ),
    ("discard=unmap", "/bin/fallocate -p -o $((32 << 20)) -l $((8 << 20)) $disk", &[(32, 8)], 8),
];

#[test]
fn what_is_given_back_is_asked_for() {
    let scratch = Scratch::new();
    let mut server = ServerCommand::new(&scratch);
    let mut images = Vec::new();
    for (name, (file, ..)) in ('a'..).zip(DISKS) {
        let id = format!("vd{name}");
        let image = Image::filled(&scratch, &format!("{id}.img"), 64);
        server = server.file(&id, &image, file).export(&id, "");
        images.push((image.allocated(), image));
    }
    let server = server.start();
    let (mut guest, mut job) = (Guest::new(), String::new());
    for (name, (_, done, ..)) in ('a'..).zip(DISKS) {
        guest = guest.disk(server.socket(&format!("vd{name}")));
        job += &format!("disk=/dev/vd{name}\n{done}\n");
    }
    guest.run(&job);
    server.stop();
    for ((before, image), (_, done, zeroed, freed)) in images.iter().zip(DISKS) {
        assert_contents(image, zeroed);
        // The file system counts its own blocks too, therefore rounded.
        let less = before.cast_signed() - image.allocated().cast_signed();
        assert_eq!((less as f64 / MIB as f64).round() as i64, freed, "{done}");
    }
}
