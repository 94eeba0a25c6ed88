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

/// Runs the job on an image with data; gives by how many MiB the image then takes up less space. The file system
/// counts its own blocks too, therefore rounded.
fn run(job: &str, file_options: &str) -> (i64, Image, Scratch) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 64);
    let before = image.allocated();
    let server =
        ServerCommand::new(&scratch).file("disk", &image, file_options).export("disk", "").start();
    Guest::new().disk(server.socket("disk")).run(job);
    server.stop();
    let freed = before.cast_signed() - image.allocated().cast_signed();
    ((freed as f64 / MIB as f64).round() as i64, image, scratch)
}

#[test]
fn discarded_space_is_given_back() {
    let job = "/bin/blkdiscard -o $((8 << 20)) -l $((16 << 20)) /dev/vda";
    let (freed, image, _scratch) = run(job, "discard=unmap");
    assert_contents(&image, &[(8, 16)]);
    assert_eq!(freed, 16);
}

#[test]
fn discard_is_ignored_unless_asked_for() {
    let job = "/bin/blkdiscard -o $((8 << 20)) -l $((16 << 20)) /dev/vda";
    let (freed, image, _scratch) = run(job, "discard=ignore");
    assert_contents(&image, &[]);
    assert_eq!(freed, 0);
}

#[test]
fn zeroes_are_written_without_giving_space_back() {
    let job = "/bin/blkdiscard -z -o $((4 << 20)) -l $((4 << 20)) /dev/vda
        /bin/fallocate -z -o $((32 << 20)) -l $((8 << 20)) /dev/vda
        head -c $((4 << 20)) /dev/zero >/tmp/zeroes
        dd if=/dev/vda bs=1M skip=4 count=4 iflag=direct 2>/dev/null | cmp - /tmp/zeroes";
    let (freed, image, _scratch) = run(job, "discard=unmap");
    assert_contents(&image, &[(4, 4), (32, 8)]);
    assert_eq!(freed, 0);
}

#[test]
fn punched_holes_are_zeroes_and_given_back() {
    let job = "/bin/fallocate -p -o $((32 << 20)) -l $((8 << 20)) /dev/vda";
    let (freed, image, _scratch) = run(job, "discard=unmap");
    assert_contents(&image, &[(32, 8)]);
    assert_eq!(freed, 8);
}
