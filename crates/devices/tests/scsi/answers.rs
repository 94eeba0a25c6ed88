//! What the device returns by itself, against the tables of SPC-4 and SBC-3.

use devices::virtio_scsi::LunConfig;

use crate::scsi::rig::{BLOCKS, Rig, SIZE, geometry};

/// A command that returns data, with a buffer of `len` bytes; how many of them were used.
fn data(rig: &mut Rig, cdb: &[u8], len: u32) -> Vec<u8> {
    let reply = rig.command(0, cdb, &[], len);
    assert_eq!((reply.response, reply.status), (0, 0), "{reply:?}");
    let used = len - reply.residual;
    assert_eq!(reply.written, 108 + used);
    assert!(reply.data[used as usize..].iter().all(|byte| *byte == 0xee), "more than it says");
    reply.data[..used as usize].to_vec()
}

fn vital(rig: &mut Rig, page: u8) -> Vec<u8> {
    let data = data(rig, &[0x12, 1, page, 0, 255, 0], 255);
    assert_eq!(data[..2], [0, page]);
    assert_eq!(usize::from(u16::from_be_bytes([data[2], data[3]])), data.len() - 4);
    data[4..].to_vec()
}

#[test]
fn standard_inquiry_data() {
    let mut rig = Rig::new();
    let mut expected = vec![0x00, 0x00, 0x06, 0x12, 31, 0, 0, 0x02];
    expected.extend(b"RINGMILLVIRTIO DISK     1   ");
    assert_eq!(data(&mut rig, &[0x12, 0, 0, 0, 96, 0], 96), expected);
    assert_eq!(data(&mut rig, &[0x12, 0, 0, 0, 5, 0], 96), expected[..5], "the allocation length");
    assert_eq!(rig.command(0, &[0x12, 0, 0x80, 0, 96, 0], &[], 96).field(), 2);
}

#[test]
fn vital_product_data() {
    let mut rig = Rig::new();
    assert_eq!(vital(&mut rig, 0x00), [0x00, 0x80, 0x83, 0xb0, 0xb1, 0xb2]);
    assert_eq!(vital(&mut rig, 0x80), b"test-0");

    let id = vital(&mut rig, 0x83);
    let name = b"RINGMILLVIRTIO DISK     test-0";
    assert_eq!(id[..4], [2, 1, 0, name.len() as u8]);
    assert_eq!(id[4..4 + name.len()], name[..]);
    let naa = &id[4 + name.len()..];
    assert_eq!((&naa[..4], naa[4] >> 4, naa.len()), (&[1, 3, 0, 8][..], 3, 12));
    let other = rig.command(1, &[0x12, 1, 0x83, 0, 255, 0], &[], 255).data;
    assert_ne!(other[4..4 + id.len()][id.len() - 8..], naa[4..], "each disk has its own");

    let limits = vital(&mut rig, 0xb0);
    let word = |at: usize| u32::from_be_bytes(limits[at - 4..at].try_into().unwrap());
    assert_eq!(limits.len(), 60);
    assert_eq!(limits[0], 1, "WSNZ");
    assert_eq!(limits[2..4], [0, 8], "optimal transfer length granularity");
    assert_eq!(word(8), 0x7fff_f000 / 512, "maximum transfer length");
    assert_eq!(word(20), (1 << 30) / 512, "maximum unmap LBA count");
    assert_eq!(word(24), 64, "maximum unmap block descriptor count");
    assert_eq!(word(28), 8, "optimal unmap granularity");
    assert_eq!((word(36), word(40)), (0, (1 << 30) / 512), "maximum write same length");

    let mut characteristics = [0; 60];
    characteristics[1] = 1;
    assert_eq!(vital(&mut rig, 0xb1), characteristics);
    assert_eq!(vital(&mut rig, 0xb2), [0, 0xe0, 2, 0]);
    assert_eq!(rig.command(0, &[0x12, 1, 0xb9, 0, 255, 0], &[], 255).field(), 2);
}

impl Rig {
    /// A disk on which nothing can be given back.
    fn thick() -> Rig {
        let mut rig = Rig::with(|config| {
            let geometry = block::node::Geometry { discard: false, ..geometry() };
            config.luns[0] = LunConfig { geometry, serial: "thick".into() };
        });
        rig.command(0, &[0], &[], 0).code();
        rig
    }
}

#[test]
fn a_disk_without_discard_says_so() {
    let mut rig = Rig::thick();
    assert_eq!(vital(&mut rig, 0xb2), [0, 0, 0, 0]);
    assert_eq!(vital(&mut rig, 0xb0)[16..28], [0; 12]);
    assert_eq!(data(&mut rig, &READ_CAPACITY_16, 32)[14], 0);
}

const READ_CAPACITY_16: [u8; 16] = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];

#[test]
fn capacity() {
    let mut rig = Rig::new();
    let last = BLOCKS - 1;
    let mut expected = last.to_be_bytes().to_vec();
    expected.extend(512u32.to_be_bytes());
    assert_eq!(data(&mut rig, &[0x25], 8), expected);
    let mut expected = u64::from(last).to_be_bytes().to_vec();
    expected.extend(512u32.to_be_bytes());
    // 8 logical blocks in a physical one; LBPME.
    expected.extend([0, 3, 0x80, 0]);
    expected.resize(32, 0);
    assert_eq!(data(&mut rig, &READ_CAPACITY_16, 32), expected);

    // More than READ CAPACITY(10) can say.
    rig.device.set_size(0, 3 << 40);
    assert_eq!(rig.command(0, &[0], &[], 0).code(), (6, 0x2a, 9), "CAPACITY DATA HAS CHANGED");
    assert_eq!(data(&mut rig, &[0x25], 8)[..4], [0xff; 4]);
    let last = (3u64 << 40) / 512 - 1;
    assert_eq!(data(&mut rig, &READ_CAPACITY_16, 32)[..8], last.to_be_bytes());
}

#[test]
fn mode_pages() {
    let mut rig = Rig::new();
    let mut caching = [0; 20];
    caching[..3].copy_from_slice(&[0x08, 18, 0x04]);
    let control = [0x0a, 10, 0, 0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0];
    let mut short = vec![0, 0, 0x10, 8];
    short.extend(BLOCKS.to_be_bytes());
    short.extend(512u32.to_be_bytes());
    short.extend(caching);
    short[0] = (short.len() - 1) as u8;
    assert_eq!(data(&mut rig, &[0x1a, 0, 0x08, 0, 255, 0], 255), short);
    let mut all = vec![0, 0, 0x10, 0];
    all.extend(caching);
    all.extend(control);
    all[0] = (all.len() - 1) as u8;
    assert_eq!(data(&mut rig, &[0x1a, 8, 0x3f, 0, 255, 0], 255), all, "DBD");
    let mut long = vec![0, 0, 0, 0x10, 1, 0, 0, 16];
    long.extend(u64::from(BLOCKS).to_be_bytes());
    long.extend([0, 0, 0, 0, 0, 0, 2, 0]);
    long.extend(control);
    long[1] = (long.len() - 2) as u8;
    assert_eq!(data(&mut rig, &[0x5a, 0x10, 0x0a, 0, 0, 0, 0, 0, 255, 0], 255), long, "LLBAA");
    // Changeable: WCE.
    let changeable = data(&mut rig, &[0x1a, 8, 0x48, 0, 255, 0], 255);
    let mut expected = [0; 20];
    expected[..3].copy_from_slice(&[0x08, 18, 0x04]);
    assert_eq!(changeable[4..], expected);
    assert_eq!(rig.command(0, &[0x1a, 8, 0x1c, 0, 255, 0], &[], 255).field(), 2, "no such page");
    assert_eq!(rig.command(0, &[0x1a, 8, 0x08, 1, 255, 0], &[], 255).field(), 3, "nor subpage");
    assert_eq!(rig.command(0, &[0x1a, 8, 0xc8, 0, 255, 0], &[], 255).code(), (5, 0x39, 0));
}

#[test]
fn a_read_only_disk_is_write_protected() {
    let mut rig = Rig::with(|config| config.writable = false);
    rig.command(0, &[0], &[], 0).code();
    assert_eq!(data(&mut rig, &[0x1a, 8, 0x08, 0, 255, 0], 255)[2], 0x90, "WP");
    for (cdb, out) in [
        (&[0x0a, 0, 0, 0, 1, 0][..], 512),
        (&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], 512),
        (&[0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0], 512),
        (&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], 24),
    ] {
        let reply = rig.command(0, cdb, &vec![0; out], 0);
        assert_eq!(reply.code(), (7, 0x27, 0), "{cdb:x?}");
    }
    assert_eq!(rig.command(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512).good(), [0; 512]);
    assert!(rig.disks[0].log.borrow().iter().all(|(op, ..)| *op == block::request::Op::Read));
}

#[test]
fn logical_units_are_listed_and_addressed() {
    let mut rig = Rig::new();
    let mut expected = vec![0, 0, 0, 16, 0, 0, 0, 0];
    expected.extend([0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([0, 1, 0, 0, 0, 0, 0, 0]);
    let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0];
    assert_eq!(data(&mut rig, &report, 512), expected);
    let well_known = [0xa0, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0];
    assert_eq!(data(&mut rig, &well_known, 512), [0; 8]);

    // Both formats of a number, on either disk.
    for lun in [[1, 0, 0, 1, 0, 0, 0, 0], [1, 0, 0x40, 1, 0, 0, 0, 0]] {
        let page = rig.command_at(lun, &[0x12, 1, 0x80, 0, 255, 0], &[], 255).data;
        assert_eq!(page[4..10], *b"test-1");
    }
    // Numbers without a logical unit.
    for lun in [[1, 0, 0x40, 2, 0, 0, 0, 0], [1, 0, 0x41, 0, 0, 0, 0, 0], [1, 0, 0, 0, 1, 0, 0, 0]]
    {
        let inquiry = rig.command_at(lun, &[0x12, 0, 0, 0, 36, 0], &[], 36).good();
        assert_eq!(inquiry[0], 0x7f);
        assert_eq!(rig.command_at(lun, &report, &[], 24).good(), expected);
        assert_eq!(rig.command_at(lun, &[0], &[], 0).code(), (5, 0x25, 0));
        let sense = rig.command_at(lun, &[3, 0, 0, 0, 18, 0], &[], 18).good();
        assert_eq!((sense[2], sense[12]), (5, 0x25));
    }
    // Targets that are not there.
    for lun in [[1, 1, 0x40, 0, 0, 0, 0, 0], [0; 8]] {
        let reply = rig.command_at(lun, &[0x12, 0, 0, 0, 36, 0], &[], 36);
        assert_eq!((reply.response, reply.residual, reply.written), (3, 36, 108), "BAD_TARGET");
    }
}

#[test]
fn unit_attention_is_reported_once() {
    let mut rig = Rig::with(|_| {});
    assert_eq!(data(&mut rig, &[0x12, 0, 0, 0, 5, 0], 5).len(), 5, "INQUIRY is not disturbed");
    assert_eq!(rig.command(0, &[0], &[], 0).code(), (6, 0x29, 0));
    assert_eq!(rig.command(0, &[0], &[], 0).status, 0);
    let sense = rig.command(1, &[3, 0, 0, 0, 18, 0], &[], 18).good();
    assert_eq!(sense[..14], [0x70, 0, 6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x29, 0], "as data");
    let sense = rig.command(1, &[3, 0, 0, 0, 18, 0], &[], 18).good();
    assert_eq!(sense[..14], [0x70, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0], "and gone");
    rig.device.set_size(0, SIZE as u64);
    assert_eq!(rig.command(0, &[0], &[], 0).status, 0, "the same size is no news");
}
