//! Each command, as a driver sees it end.

use block::request::Op;
use vcpu::ahci::{Command, reg};

use crate::ahci::rig::*;

fn word(page: &[u8], word: usize) -> u16 {
    u16::from_le_bytes([page[word * 2], page[word * 2 + 1]])
}

fn text(page: &[u8], words: std::ops::Range<usize>) -> String {
    let bytes = &page[words.start * 2..words.end * 2];
    let swapped: Vec<u8> = bytes.chunks(2).flat_map(|pair| [pair[1], pair[0]]).collect();
    String::from_utf8(swapped).unwrap().trim().to_owned()
}

#[test]
fn identify_describes_the_drive() {
    let mut rig = Rig::new();
    let page = rig.port().identify().unwrap();
    assert_eq!(page.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
    assert_eq!(text(&page, 10..20), "serial-0");
    assert_eq!(text(&page, 27..47), "a model");
    assert_eq!(u64::from_le_bytes(page[200..208].try_into().unwrap()), SECTORS);
    assert_eq!(u32::from_le_bytes(page[120..124].try_into().unwrap()), SECTORS as u32);
    assert_eq!(word(&page, 106), 0x6003, "8 sectors of 512 bytes are a block");
    assert_eq!(word(&page, 76) & 0x100, 0x100, "NCQ");
    assert_eq!((word(&page, 75), word(&page, 169)), (31, 1));
    assert_eq!(word(&page, 48) & 0xc000, 0x4000, "a word of ATA8-ACS, valid");
    // A PIO command that reads: its status comes by the PIO Setup FIS, which interrupts.
    let fis = rig.fis(PIO_SETUP);
    assert_eq!((fis[0], fis[1], fis[2] & 8, fis[15]), (0x5f, 0x60, 8, 0x50));
    assert_eq!(rig.port().read(reg::PX_IS), reg::IS_PSS);
    assert_eq!(rig.port().read(reg::PX_TFD), 0x50);
    let transferred = rig.read_memory(area(0).list() + 4, 4);
    assert_eq!(transferred, 512u32.to_le_bytes());
    drop(rig);
    let mut rig = Rig::with(1, true);
    let page = rig.port().identify().unwrap();
    assert_eq!((word(&page, 105), word(&page, 169)), (0, 0), "nothing to trim on a read-only disk");
}

/// Reads of every kind: what the command is, how many sectors, how it ends.
#[test]
fn reads_of_every_kind() {
    for (code, queued, pio) in [
        (0x25, false, false),
        (0xc8, false, false),
        (0x20, false, true),
        (0x24, false, true),
        (0xc4, false, true),
        (0x29, false, true),
        (0x60, true, false),
    ] {
        let mut rig = Rig::new();
        let (lba, sectors) = (77, 5);
        let asked = if queued {
            Command::queued(0, false, lba * 512, sectors * 512)
        } else {
            Command { lba, count: sectors as u16, ..command(code) }
        };
        rig.port().run(&asked, sectors * 512).unwrap();
        let expected: Vec<u8> = (77 * 512..82 * 512).map(pattern).collect();
        assert!(rig.port().data(0, 5 * 512).unwrap() == expected, "{code:#x}");
        let is = rig.port().read(reg::PX_IS);
        let expected = match (queued, pio) {
            (true, _) => reg::IS_SDBS,
            (_, true) => reg::IS_PSS,
            _ => reg::IS_DHRS,
        };
        assert_eq!(is, expected, "{code:#x}");
        assert_eq!(rig.log(), [(Op::Read, 77 * 512, 5 * 512)], "{code:#x}");
    }
}

#[test]
fn writes_of_every_kind() {
    for (code, queued, pio, fua) in [
        (0x35, false, false, false),
        (0x3d, false, false, true),
        (0xca, false, false, false),
        (0x30, false, true, false),
        (0x34, false, true, false),
        (0xc5, false, true, false),
        (0x39, false, true, false),
        (0xce, false, true, true),
        (0x61, true, false, false),
        (0x61, true, false, true),
    ] {
        let mut rig = Rig::new();
        let asked = if queued {
            let device = 0x40 | u8::from(fua) << 7;
            Command { device, ..Command::queued(0, true, 9 * 512, 1024) }
        } else {
            Command { lba: 9, count: 2, write: true, ..command(code) }
        };
        let data = [code; 1024];
        rig.write_memory(area(0).data(0), &data);
        rig.port().run(&asked, 1024).unwrap();
        assert_eq!(rig.disk().bytes.borrow()[9 * 512..11 * 512], data, "{code:#x}");
        assert_eq!(rig.disk().bytes.borrow()[11 * 512], pattern(11 * 512));
        assert_eq!(rig.log(), [(Op::Write { fua }, 9 * 512, 1024)], "{code:#x}");
        let expected = match (queued, pio) {
            (true, _) => reg::IS_SDBS,
            (_, true) => reg::IS_PSS | reg::IS_DHRS,
            _ => reg::IS_DHRS,
        };
        assert_eq!(rig.port().read(reg::PX_IS), expected, "{code:#x}");
    }
}

/// SATA's PIO data-out protocol: a PIO Setup FIS before each block, with an interrupt from the second on; the status comes
/// by a Register FIS.
#[test]
fn pio_writes_have_a_setup_fis_before_each_block() {
    for (sectors, flags, interrupts) in
        [(1, 0, reg::IS_DHRS), (2, 0x40, reg::IS_PSS | reg::IS_DHRS)]
    {
        let mut rig = Rig::new();
        let write = Command { lba: 9, count: sectors, write: true, ..command(0x34) };
        rig.port().run(&write, u32::from(sectors) * 512).unwrap();
        let fis = rig.fis(PIO_SETUP);
        assert_eq!((fis[0], fis[1]), (0x5f, flags), "from host to device");
        assert_eq!((fis[2] & 0x88, fis[15] & 0x88), (0x08, 0x80), "DRQ, then BSY");
        assert_eq!(u16::from_le_bytes([fis[16], fis[17]]), 512);
        assert_eq!(rig.port().read(reg::PX_IS), interrupts);
        let fis = rig.fis(D2H);
        assert_eq!((fis[0], fis[1], fis[2]), (0x34, 0x40, 0x50));
        assert_eq!(rig.port().read(reg::PX_TFD), 0x50);
    }
    // The drive has no block to wait for if it refuses the command.
    let mut rig = Rig::with(1, true);
    rig.failure(&Command { count: 1, write: true, ..command(0x34) }, 512);
    assert_eq!(rig.fis(PIO_SETUP)[0], 0);
}

#[test]
fn the_native_maximum_is_the_last_sector() {
    let mut rig = Rig::new();
    let last = SECTORS - 1;
    for code in [0xf8, 0x27] {
        rig.port().run(&command(code), 0).unwrap();
        let fis = rig.fis(D2H);
        assert_eq!(u64::from(fis[4]) | u64::from(fis[5]) << 8 | u64::from(fis[6]) << 16, last);
        assert_eq!((fis[7], [fis[8], fis[9], fis[10]]), (0x40, [0; 3]));
    }
    for (sectors, device, low, high) in
        [(1 << 28, 0x4f, [0xff; 3], [0x0f, 0, 0]), ((1 << 40) + 3, 0x4f, [0xff; 3], [0, 0, 1])]
    {
        let mut rig = Rig::of_size(sectors * 512);
        rig.port().run(&command(0xf8), 0).unwrap();
        let fis = rig.fis(D2H);
        assert_eq!((fis[7], [fis[4], fis[5], fis[6]]), (device, low), "28 bits");
        rig.port().run(&command(0x27), 0).unwrap();
        let fis = rig.fis(D2H);
        assert_eq!([fis[8], fis[9], fis[10]], high, "48 bits");
    }
}

#[test]
fn a_count_of_0_is_the_most_there_can_be() {
    let mut rig = Rig::new();
    // 256 sectors by a 28-bit command, in two pieces, since a slot has 64 KiB.
    let pieces = [(FREE, 100 << 10), (FREE + (100 << 10), 28 << 10)];
    rig.port().prepare_prdt(0, &Command { lba: 0, count: 0, ..command(0xc8) }, &pieces).unwrap();
    rig.port().ring(1);
    rig.port().finish(1).unwrap();
    assert_eq!(rig.log(), [(Op::Read, 0, 256 * 512)]);
    assert_eq!(rig.read_memory(FREE + 255 * 512, 1)[0], pattern(255 * 512));
    // 65536 by a 48-bit one: more than this disk has.
    let failure = rig.failure(&Command { count: 0, ..command(0x25) }, REQUEST);
    assert_eq!(error(&failure), IDNF);
    let queued = Command { features: 0, ..Command::queued(0, false, 0, 0) };
    assert_eq!(error(&rig.failure(&queued, REQUEST)), IDNF);
}

#[test]
fn addresses_beyond_24_bits_are_beyond_this_disk() {
    let mut rig = Rig::new();
    let low = Command { lba: 0, count: 1, device: 0x41, ..command(0xc8) };
    assert_eq!(error(&rig.failure(&low, 512)), IDNF, "LBA bits 27:24 are in DEVICE");
    for (lba, count) in [(SECTORS, 1), (SECTORS - 1, 2), ((1 << 48) - 1, 1), (1 << 32, 1)] {
        let failure = rig.failure(&Command { lba, count, ..command(0x25) }, 1024);
        assert_eq!(error(&failure), IDNF, "{lba:#x}");
        assert_eq!(failure.unfinished, 1, "PxCI keeps the bit of what failed");
        let fis = rig.fis(D2H);
        assert_eq!((fis[0], fis[2], fis[3]), (0x34, 0x51, IDNF as u8));
    }
    rig.port().run(&Command { lba: SECTORS - 1, count: 1, ..command(0x25) }, 512).unwrap();
    assert_eq!(rig.log(), [(Op::Read, DISK as u64 - 512, 512)]);
    let chs = Command { count: 1, device: 0, ..command(0xc8) };
    assert_eq!(error(&rig.failure(&chs, 512)), ABRT, "cylinders");
}

#[test]
fn flushes_and_power() {
    let mut rig = Rig::new();
    for code in [0xe7, 0xea, 0xe0, 0xe2] {
        rig.port().run(&command(code), 0).unwrap();
        assert_eq!(rig.log(), [(Op::Flush, 0, 0)], "{code:#x}");
    }
    rig.port().run(&command(0xe5), 0).unwrap();
    assert_eq!(rig.fis(D2H)[12], 0xff, "CHECK POWER MODE: active");
    for code in [0xe1, 0xe3, 0x91, 0x90] {
        rig.port().run(&command(code), 0).unwrap();
    }
    assert_eq!(rig.port().read(reg::PX_TFD), 0x150, "diagnostics passed");
    for code in [0x40, 0x42] {
        rig.port().run(&Command { lba: 3, count: 4, ..command(code) }, 0).unwrap();
        let beyond = Command { lba: SECTORS - 1, count: 2, ..command(code) };
        assert_eq!(error(&rig.failure(&beyond, 0)), IDNF);
    }
    assert_eq!(rig.log(), []);
}

#[test]
fn unsupported_commands_are_aborted() {
    let mut rig = Rig::new();
    let features = |command: Command, features, count| Command { features, count, ..command };
    // NOP, PACKET, IDENTIFY PACKET, SMART, SET MAX (EXT), SECURITY, DOWNLOAD, trusted,
    // READ LOG DMA, READ STREAM, CFA, ZAC, undefined.
    let codes = [
        0x00, 0xa0, 0xa1, 0xb0, 0xf9, 0x37, 0xf1, 0xf5, 0x92, 0x5c, 0x47, 0x2a, 0xc0, 0x4a, 0x63,
        0x64, 0x65, 0xff, 0x26,
    ];
    let mut commands: Vec<Command> = codes.map(command).into();
    let set_features = command(0xef);
    // Transfer modes that there are not; SATA features; APM; unknown.
    for (feature, count) in
        [(3, 0x47), (3, 0x23), (3, 0x0d), (0x10, 2), (5, 1), (0x85, 0), (0x77, 0)]
    {
        commands.push(features(set_features, feature, count));
    }
    // SET MULTIPLE MODE: 0, 3, 32.
    commands.extend([0, 3, 32].map(|count| features(command(0xc6), 0, count)));
    // DATA SET MANAGEMENT that is no TRIM, or too much.
    commands.extend([(0, 1), (1, 0), (1, 9), (3, 1)].map(|(f, n)| features(command(0x06), f, n)));
    // READ LOG EXT: no such log, no such page, two pages.
    for (lba, count) in [(0x30, 1), (0x110, 1), (1 << 32 | 0x10, 1), (0x10, 2), (0x10, 0)] {
        commands.push(Command { lba, count, ..command(0x2f) });
    }
    for command in commands {
        let failure = rig.failure(&command, 4096);
        assert_eq!((error(&failure), failure.tfd & 0xff), (ABRT, 0x51), "{command:x?}");
        assert_ne!(failure.is & reg::IS_TFES, 0);
    }
    assert_eq!(rig.log(), []);
    rig.port().identify().unwrap();
}

#[test]
fn set_features_that_linux_sends() {
    let mut rig = Rig::new();
    let set = |features, count| Command { features, count, ..command(0xef) };
    for mode in [0, 1, 8, 0x0c, 0x20, 0x22, 0x40, 0x45, 0x46] {
        rig.port().run(&set(3, mode), 0).unwrap();
    }
    for feature in [0x55, 0xaa, 0x66, 0xcc] {
        rig.port().run(&set(feature, 0), 0).unwrap();
    }
    for count in [1, 2, 4, 8, 16] {
        rig.port().run(&Command { count, ..command(0xc6) }, 0).unwrap();
    }
    // The write cache: off, it is emptied, and each write is on stable storage before it is answered.
    rig.port().run(&set(0x82, 0), 0).unwrap();
    assert_eq!(word(&rig.port().identify().unwrap(), 85) & 0x20, 0);
    rig.port().run(&Command::dma(true, 0, 512), 512).unwrap();
    rig.port().run(&Command::queued(0, true, 0, 512), 512).unwrap();
    rig.port().run(&set(2, 0), 0).unwrap();
    assert_eq!(word(&rig.port().identify().unwrap(), 85) & 0x20, 0x20);
    rig.port().run(&Command::dma(true, 0, 512), 512).unwrap();
    let fua = |fua| (Op::Write { fua }, 0, 512);
    assert_eq!(rig.log(), [(Op::Flush, 0, 0), fua(true), fua(true), fua(false)]);
    // A COMRESET brings the default back.
    rig.port().run(&set(0x82, 0), 0).unwrap();
    rig.port().stop_list().unwrap();
    rig.port().comreset().unwrap();
    rig.port().start_list();
    assert_eq!(word(&rig.port().identify().unwrap(), 85) & 0x20, 0x20);
}

#[test]
fn trim_joins_ranges_that_touch() {
    let mut rig = Rig::new();
    let range = |lba: u64, sectors: u64| (lba | sectors << 48).to_le_bytes();
    let mut payload = vec![0; 1024];
    let ranges = [(8, 8), (16, 8), (0, 0), (100, 1), (24, 4)];
    for (at, (lba, sectors)) in ranges.into_iter().enumerate() {
        payload[at * 8..at * 8 + 8].copy_from_slice(&range(lba, sectors));
    }
    // And one at the end of the second block.
    payload[1016..].copy_from_slice(&range(SECTORS - 1, 1));
    rig.write_memory(area(0).data(0), &payload);
    let trim = Command { features: 1, count: 2, write: true, ..command(0x06) };
    rig.port().run(&trim, 1024).unwrap();
    let discard = |lba: u64, sectors: u64| (Op::Discard, lba * 512, sectors * 512);
    let expected = [discard(8, 16), discard(100, 1), discard(24, 4), discard(SECTORS - 1, 1)];
    assert_eq!(rig.log(), expected);
    assert_eq!(rig.disk().bytes.borrow()[23 * 512 + 511], 0);
    // One beyond the end: nothing is done.
    rig.write_memory(area(0).data(0) + 8, &range(SECTORS - 1, 2));
    assert_eq!(error(&rig.failure(&trim, 1024)), IDNF);
    assert_eq!(rig.log(), []);
    // No ranges at all.
    rig.write_memory(area(0).data(0), &[0; 1024]);
    rig.port().run(&trim, 1024).unwrap();
}

#[test]
fn a_read_only_disk_takes_no_writes() {
    let mut rig = Rig::with(1, true);
    for code in [0x35, 0x3d, 0xca, 0x30, 0x34, 0xc5, 0x39, 0x06] {
        let write = Command { count: 1, features: 1, write: true, ..command(code) };
        assert_eq!(error(&rig.failure(&write, 512)), ABRT, "{code:#x}");
    }
    assert_eq!(error(&rig.failure(&Command::queued(0, true, 0, 512), 512)), ABRT);
    rig.port().run(&Command { lba: 0x10, count: 1, ..command(0x2f) }, 512).unwrap();
    assert_eq!(rig.log(), []);
    rig.port().run(&Command::dma(false, 0, 512), 512).unwrap();
    rig.port().run(&command(0xea), 0).unwrap();
}

#[test]
fn the_log_directory_names_the_logs() {
    let mut rig = Rig::new();
    rig.port().run(&Command { lba: 0, count: 1, ..command(0x2f) }, 512).unwrap();
    let page = rig.port().data(0, 512).unwrap();
    let there: Vec<usize> = (0..256).filter(|log| word(&page, *log) != 0).collect();
    assert_eq!(there, [0, 0x10], "version, and the queued error log");
    rig.port().run(&Command { lba: 0x10, count: 1, ..command(0x2f) }, 512).unwrap();
    assert_eq!(rig.port().data(0, 1).unwrap(), [0x80], "no queued command has failed");
}

/// Pieces of odd lengths at odd places: a driver's PRD tables are even, ours takes what comes.
#[test]
fn prd_tables_of_any_shape() {
    let mut rig = Rig::new();
    let lens = [1, 511, 3, 1000, 2, 4096, 7, 513, 59];
    let total: u32 = lens.iter().sum();
    let sectors = total.div_ceil(512);
    let mut pieces = Vec::new();
    let mut at = FREE;
    for len in lens {
        pieces.push((at, len));
        // Addresses are even.
        at += u64::from(len.next_multiple_of(2) + 8);
    }
    // The last is longer than what is left.
    pieces.push((at, REQUEST));
    rig.write_memory(FREE, &vec![0xee; 64 << 10]);
    rig.port().prepare_prdt(0, &Command::dma(false, 512, sectors * 512), &pieces).unwrap();
    rig.port().ring(1);
    rig.port().finish(1).unwrap();
    let (mut expected, bytes) = (512, sectors as usize * 512);
    for (addr, len) in pieces {
        let len = (len as usize).min(512 + bytes - expected);
        let got = rig.read_memory(addr, len + 1);
        for byte in &got[..len] {
            assert_eq!(*byte, pattern(expected));
            expected += 1;
        }
        assert_eq!(got[len], 0xee, "not a byte more");
    }
    assert_eq!(rig.read_memory(area(0).list() + 4, 4), (bytes as u32).to_le_bytes());
}

#[test]
fn a_prd_entry_may_ask_for_an_interrupt() {
    let mut rig = Rig::new();
    rig.port().prepare(0, &Command::dma(false, 0, 512), 512).unwrap();
    let flags = area(0).table(0) + 0x80 + 12;
    rig.write_memory(flags, &(511u32 | 1 << 31).to_le_bytes());
    rig.port().ring(1);
    rig.port().finish(1).unwrap();
    assert_eq!(rig.port().read(reg::PX_IS), reg::IS_DPS | reg::IS_DHRS);
}

#[test]
fn a_prd_table_that_is_too_short_overflows() {
    let mut rig = Rig::new();
    for command in [Command::dma(false, 0, 2048), Command::queued(0, true, 0, 2048)] {
        for len in [0, 512, 2047] {
            let failure = rig.failure(&command, len);
            assert_eq!(failure.is & reg::IS_ERRORS, reg::IS_OFS | reg::IS_TFES);
            if command.write {
                rig.port()
                    .run(&Command { lba: 0x10, count: 1, ..self::command(0x2f) }, 512)
                    .unwrap();
            }
        }
    }
    assert_eq!(rig.log(), []);
}
