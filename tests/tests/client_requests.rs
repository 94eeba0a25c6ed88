//! Each type of request, right and wrong, from a client without a guest, and the status that the virtio
//! specification (1.2, section 5.2.6) names for it.

use integration::{
    BlkClient, Image, Request, Scratch, Segment, Server, ServerCommand, pattern, request,
};

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// Sectors of the disk: 8 MiB.
const CAPACITY: u64 = 16384;
/// `VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`.
const UNMAP: u32 = 1;

struct Disk {
    client: BlkClient,
    image: Image,
    server: Server,
    _scratch: Scratch,
}

fn disk(file_options: &str, export_options: &str) -> Disk {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 8);
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, file_options)
        .export("disk", export_options)
        .start();
    let client = BlkClient::connect(&server.socket("disk"), 1, 128).expect("the export serves");
    Disk { client, image, server, _scratch: scratch }
}

impl Disk {
    /// Ends the daemon in order, so that the image can be looked at.
    fn end(self) -> (Image, Scratch) {
        drop(self.client);
        self.server.stop();
        (self.image, self._scratch)
    }

    /// Fails unless the image is as it was made.
    fn end_unchanged(self) {
        let (image, _scratch) = self.end();
        for index in 0..CAPACITY / 8 {
            let block = image.read(index * 4096, pattern::BLOCK);
            assert_eq!(pattern::generation(index, &block), Ok(0));
        }
    }

    fn status(&mut self, kind: u32, sector: u64, output: &[u8]) -> u8 {
        self.client.call(kind, sector, output, 0).status
    }
}

/// A range of a discard or write-zeroes request.
fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let (sector, sectors, flags) =
        (sector.to_le_bytes(), sectors.to_le_bytes(), flags.to_le_bytes());
    sector.into_iter().chain(sectors).chain(flags).collect()
}

#[test]
fn the_configuration_has_size_and_limits() {
    let disk = disk("", "num-queues=2,logical-block-size=4096");
    let config = disk.client.config().expect("a configuration");
    assert_eq!(u64::from(config.capacity), CAPACITY);
    assert_eq!(u32::from(config.blk_size), 4096);
    assert_eq!(u16::from(config.num_queues), 2);
    assert!(u32::from(config.seg_max) >= 1);
    assert!(u32::from(config.max_discard_sectors) >= 1);
    assert!(u32::from(config.max_discard_seg) >= 1);
    assert!(u32::from(config.max_write_zeroes_sectors) >= 1);
    assert!(u32::from(config.max_write_zeroes_seg) >= 1);
    disk.end_unchanged();
}

#[test]
fn reads_return_written_data() {
    let mut disk = disk("", "");
    assert_eq!(pattern::generation(5, &disk.client.read(40, pattern::BLOCK)), Ok(0));
    disk.client.write(40, &pattern::block(5, 1));
    assert_eq!(disk.status(request::FLUSH, 0, &[]), OK);
    assert_eq!(pattern::generation(5, &disk.client.read(40, pattern::BLOCK)), Ok(1));
    // A large request, up to the last sector.
    disk.client.write(CAPACITY - 8192, &vec![0x5a; 4 << 20]);
    assert_eq!(disk.client.read(CAPACITY - 8192, 4 << 20), vec![0x5a; 4 << 20]);
    let (image, _scratch) = disk.end();
    assert_eq!(pattern::generation(5, &image.read(5 * 4096, pattern::BLOCK)), Ok(1));
    assert_eq!(image.read(4 << 20, 4 << 20), vec![0x5a; 4 << 20]);
}

#[test]
fn scattered_and_odd_segments_are_one_transfer() {
    for file_options in ["cache.direct=on", "cache.direct=on,aio=io_uring", "aio=threads"] {
        let mut disk = disk(file_options, "");
        // 32 KiB in 60 pieces of odd lengths at odd addresses.
        let mut segments = Vec::new();
        let mut data = Vec::new();
        for index in 0..60 {
            let len = if index < 59 { 511 + 2 * (index % 30) } else { 32768 - data.len() };
            segments.push(Segment { at: 1 + 4099 * index as u64, len, device_writes: false });
            data.extend((0..len).map(|byte| (byte * 7 + index) as u8));
        }
        let mut rest = data.as_slice();
        for segment in &segments {
            let (part, next) = rest.split_at(segment.len);
            disk.client.put(segment.at, part);
            rest = next;
        }
        let write = Request { kind: request::OUT, sector: 8, segments };
        disk.client.submit(0, &write);
        assert_eq!(disk.client.wait(0).expect("a reply")[0].status, OK);
        assert!(disk.client.read(8, 32768) == data, "{file_options}: other data than written");

        let segments: Vec<_> = write
            .segments
            .iter()
            .map(|part| Segment { at: part.at + (4 << 20), device_writes: true, ..*part })
            .collect();
        let read = Request { kind: request::IN, sector: 8, segments };
        disk.client.submit(0, &read);
        assert_eq!(disk.client.wait(0).expect("a reply")[0].status, OK);
        let parts = read.segments.iter().flat_map(|part| disk.client.get(part.at, part.len));
        assert!(parts.eq(data.iter().copied()), "{file_options}: read other data");
        disk.end();
    }
}

#[test]
fn get_id_fills_twenty_bytes() {
    let mut disk = disk("", "");
    let reply = disk.client.call(request::GET_ID, 0, &[], 20);
    assert_eq!(reply.status, OK);
    let end = reply.data.iter().position(|&byte| byte == 0).unwrap_or(20);
    assert!(end > 0 && reply.data[..end].is_ascii(), "{reply:?}");
    assert!(reply.data[end..].iter().all(|&byte| byte == 0), "{reply:?}");
    disk.end_unchanged();
}

#[test]
fn zeroes_are_written() {
    let mut disk = disk("discard=unmap", "");
    assert_eq!(disk.status(request::WRITE_ZEROES, 0, &range(16, 8, 0)), OK);
    assert_eq!(disk.status(request::WRITE_ZEROES, 0, &range(32, 8, UNMAP)), OK);
    for index in 0..8 {
        let data = disk.client.read(8 * index, pattern::BLOCK);
        if index == 2 || index == 4 {
            assert_eq!(data, [0; pattern::BLOCK]);
        } else {
            assert_eq!(pattern::generation(index, &data), Ok(0));
        }
    }
    disk.end();
}

#[test]
fn a_discarded_range_reads_as_zeroes() {
    let mut disk = disk("discard=unmap", "");
    assert_eq!(disk.status(request::DISCARD, 0, &range(1024, 2048, 0)), OK);
    assert_eq!(disk.client.read(1024, 1 << 20), vec![0; 1 << 20]);
    assert_eq!(pattern::generation(127, &disk.client.read(1016, 4096)), Ok(0));
    assert_eq!(pattern::generation(384, &disk.client.read(3072, 4096)), Ok(0));
    let (image, _scratch) = disk.end();
    // With a few blocks of the file system's own, by how many pieces the file is in.
    let most = (7 << 20) + (64 << 10);
    assert!(image.allocated() <= most, "{} bytes in use", image.allocated());
}

#[test]
fn transfers_beyond_the_end_fail() {
    let mut disk = disk("", "");
    for (sector, len) in [
        (CAPACITY, 512),
        (CAPACITY - 1, 1024),
        (CAPACITY + 1, 512),
        (u64::MAX, 512),
        (u64::MAX / 512, 512),
        (1 << 55, 512),
    ] {
        assert_eq!(disk.client.call(request::IN, sector, &[], len).status, IOERR, "read {sector}");
        assert_eq!(disk.status(request::OUT, sector, &vec![1; len]), IOERR, "write {sector}");
    }
    for kind in [request::DISCARD, request::WRITE_ZEROES] {
        for (sector, sectors) in [(CAPACITY, 1), (CAPACITY - 1, 2), (u64::MAX, 1)] {
            let status = disk.status(kind, 0, &range(sector, sectors, 0));
            assert_eq!(status, IOERR, "request {kind} of {sectors} sectors at {sector}");
        }
    }
    disk.end_unchanged();
}

#[test]
fn parts_of_sectors_fail() {
    let mut disk = disk("", "");
    for len in [1, 511, 513, 4097] {
        assert_eq!(disk.client.call(request::IN, 0, &[], len).status, IOERR, "read of {len}");
        assert_eq!(disk.status(request::OUT, 0, &vec![1; len]), IOERR, "write of {len}");
    }
    disk.end_unchanged();
}

#[test]
fn unknown_requests_are_unsupported() {
    let mut disk = disk("", "");
    // VIRTIO_BLK_T_SECURE_ERASE, for which the feature is not offered, and types that were never used.
    for kind in [14, 77, u32::MAX >> 1] {
        assert_eq!(disk.status(kind, 0, &[1; 512]), UNSUPP, "type {kind}");
    }
    disk.end_unchanged();
}

#[test]
fn unknown_flags_are_unsupported() {
    let mut disk = disk("discard=unmap", "");
    assert_eq!(disk.status(request::DISCARD, 0, &range(0, 8, UNMAP)), UNSUPP);
    assert_eq!(disk.status(request::DISCARD, 0, &range(0, 8, 2)), UNSUPP);
    assert_eq!(disk.status(request::WRITE_ZEROES, 0, &range(0, 8, 2)), UNSUPP);
    assert_eq!(disk.status(request::WRITE_ZEROES, 0, &range(0, 8, UNMAP | 1 << 31)), UNSUPP);
    disk.end_unchanged();
}

#[test]
fn too_many_or_broken_ranges_are_refused() {
    let mut disk = disk("discard=unmap", "");
    let config = disk.client.config().expect("a configuration");
    let limits = [
        (request::DISCARD, config.max_discard_seg, config.max_discard_sectors),
        (request::WRITE_ZEROES, config.max_write_zeroes_seg, config.max_write_zeroes_sectors),
    ];
    for (kind, ranges, sectors) in limits {
        let too_many = range(0, 8, 0).repeat(u32::from(ranges) as usize + 1);
        assert_ne!(disk.status(kind, 0, &too_many), OK, "request {kind}: too many ranges");
        assert_ne!(disk.status(kind, 0, &range(0, 8, 0)[..15]), OK, "request {kind}: part of one");
        assert_ne!(disk.status(kind, 0, &[]), OK, "request {kind}: no range");
        if let Some(beyond) = u32::from(sectors).checked_add(1) {
            let status = disk.status(kind, 0, &range(0, beyond, 0));
            assert_ne!(status, OK, "request {kind}: too many sectors");
        }
    }
    disk.end_unchanged();
}

#[test]
fn a_read_only_export_takes_no_changes() {
    let mut disk = disk("read-only=on", "writable=off");
    assert!(disk.client.features().contains(virtio_driver::VirtioBlkFeatureFlags::RO));
    assert_eq!(pattern::generation(1, &disk.client.read(8, pattern::BLOCK)), Ok(0));
    assert_eq!(disk.status(request::OUT, 0, &[1; 512]), IOERR);
    for kind in [request::DISCARD, request::WRITE_ZEROES] {
        assert_ne!(disk.status(kind, 0, &range(0, 8, 0)), OK, "request {kind}");
    }
    disk.end_unchanged();
}
