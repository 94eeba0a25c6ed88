//! The crates as a program without the daemon uses them: images opened, read, written and served.

use exports::serve;
use img::{Access, Images, NewImage, Source};
use integration::{BlkClient, Scratch, nbd, pattern};

/// Bytes of the images: more than one request of the library takes, and no whole number of those.
const SIZE: u64 = (3 << 20) + 4096;

/// What the images have at first.
fn contents() -> Vec<u8> {
    let blocks = (0..).flat_map(|index| pattern::block(index, 1));
    blocks.take(SIZE as usize).collect()
}

/// Makes an image with these contents. Returns its name.
fn patterned(scratch: &Scratch, images: &mut Images, format: &str) -> String {
    let name = scratch.path(format).display().to_string();
    let (format, size) = (format.to_owned(), Some(SIZE));
    images.create(&NewImage { name: name.clone(), format, size, ..NewImage::default() }).unwrap();
    let image = images.open(&Source::new(name.clone()), &Access::WRITE).unwrap();
    let disk = images.disk(&image).unwrap();
    disk.write_at(&contents(), 0).unwrap();
    drop(disk);
    images.close(image).unwrap();
    name
}

/// This library and QEMU read the bytes that this library has written, at any byte, with and without the page cache.
#[test]
fn images_are_read_and_written_at_any_byte() {
    let scratch = Scratch::new();
    let mut images = Images::new().unwrap();
    for (format, direct) in [("raw", false), ("raw", true), ("qcow2", false), ("qcow2", true)] {
        let name = patterned(&scratch, &mut images, format);
        let access = Access { direct, ..Access::WRITE };
        let image = images.open(&Source::with_format(name.clone(), format), &access).unwrap();
        let disk = images.disk(&image).unwrap();
        let mut expected = contents();
        disk.write_at(b"across the end of a request", (1 << 20) - 5).unwrap();
        expected[(1 << 20) - 5..][..27].copy_from_slice(b"across the end of a request");
        disk.write_zeroes_at(2_000_001, 70_000).unwrap();
        expected[2_000_001..2_070_001].fill(0);
        disk.flush().unwrap();
        let mut read = vec![0; SIZE as usize - 3];
        disk.read_at(&mut read, 3).unwrap();
        assert!(read == expected[3..], "{format}, direct: {direct}");
        disk.read_at(&mut [], SIZE).unwrap();

        for outside in [SIZE - 3, SIZE + 1, u64::MAX] {
            let why = disk.read_at(&mut [0; 4], outside).unwrap_err().to_string();
            assert!(why.contains(&format!("has {SIZE} bytes")), "{why}");
            disk.write_at(&[0; 4], outside).unwrap_err();
            disk.write_zeroes_at(outside, 4).unwrap_err();
        }
        drop(disk);
        images.close(image).unwrap();

        let image = images.open(&Source::new(name.clone()), &Access::READ).unwrap();
        let why = images.disk(&image).unwrap().write_at(&[1], 0).unwrap_err().to_string();
        assert!(why.contains("Read-only"), "{why}");
        images.close(image).unwrap();
        let by_qemu = scratch.path("by-qemu").display().to_string();
        nbd::client_output(&scratch, "qemu-img", &["convert", "-O", "raw", &name, &by_qemu]);
        assert!(std::fs::read(&by_qemu).unwrap() == expected, "{format}, direct: {direct}");
    }
}

/// Clients read and write a served image. When the service has stopped, all of it is in the file, though the set that opened
/// the image has gone before.
#[test]
fn an_image_is_served_by_one_call() {
    let scratch = Scratch::new();
    let mut images = Images::new().unwrap();
    let name = patterned(&scratch, &mut images, "qcow2");
    let image = images.open(&Source::new(name.clone()), &Access::WRITE).unwrap();
    let (by_nbd, by_vhost) = (scratch.path("nbd.sock"), scratch.path("vhost.sock"));
    let nbd = serve::nbd(image.node(), "disk", by_nbd.as_path()).unwrap();
    let vhost = serve::vhost_user_blk(image.node(), &by_vhost, 2).unwrap();
    let refused = serve::nbd(image.node(), "disk", by_nbd.as_path()).err().unwrap().to_string();
    assert!(refused.contains("another process does"), "{refused}");
    let refused = serve::vhost_user_blk(image.node(), scratch.path("none"), 0).err().unwrap();
    assert_eq!(refused.to_string(), "num-queues must be from 1 to 256, not 0");
    drop((image, images));

    let uri = format!("nbd+unix:///disk?socket={}", by_nbd.display());
    let copied = scratch.path("copied").display().to_string();
    nbd::client_output(&scratch, "nbdcopy", &[&uri, &copied]);
    assert!(std::fs::read(&copied).unwrap() == contents());
    let mut guest = BlkClient::connect(&by_vhost, 2, 128).unwrap();
    guest.write(9, &[0x5a; 512]);
    drop(guest);

    vhost.stop().unwrap();
    nbd.stop().unwrap();
    assert!(!by_nbd.exists() && !by_vhost.exists());
    let mut expected = contents();
    expected[9 * 512..][..512].fill(0x5a);
    nbd::client_output(&scratch, "qemu-img", &["check", &name]);
    nbd::client_output(&scratch, "qemu-img", &["convert", "-O", "raw", &name, &copied]);
    assert!(std::fs::read(&copied).unwrap() == expected);
}
