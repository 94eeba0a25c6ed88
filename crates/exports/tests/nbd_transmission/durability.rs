//! Data reported to a client as durable survives a power cut at that moment.

use block::test_util::{Format, VolatileDisk};

use crate::nbd_transmission::rig::*;

const SIZE: u64 = 1 << 20;
/// The bytes that are written, from here on.
const AT: u64 = 12 << 10;
const LEN: u32 = 8192;

const FLUSH: u8 = 3;
const TRIM: u8 = 4;
const WRITE_ZEROES: u8 = 6;

/// Flags of a request.
const FUA: u8 = 1;
const NO_HOLE: u8 = 2;

/// Of an export: several connections see each other's flushes.
const CAN_MULTI_CONN: u16 = 1 << 8;

struct Server {
    rig: Rig,
    disk: VolatileDisk,
}

impl Server {
    fn new(name: &str, format: Format, loops: usize, writethrough: bool) -> Server {
        let disk = VolatileDisk::new(format, SIZE);
        let event_loops = (0..loops).map(|_| disk.event_loop()).collect();
        let name = format!("{name}-{format:?}");
        Server { rig: Rig::on(&name, event_loops, disk.node().clone(), writethrough), disk }
    }

    fn ask(&mut self, kind: u8, flags: u8, offset: u64, len: u32, payload: &[u8]) {
        let mut bytes = request(kind, offset, offset, len);
        bytes[5] = flags;
        self.rig.send(&bytes);
        self.rig.send(payload);
        self.rig.takes_reply(offset);
    }

    /// Writes `byte` over the bytes; whether a power cut leaves it.
    fn write(&mut self, flags: u8, byte: u8) -> bool {
        self.ask(WRITE, flags, AT, LEN, &[byte; LEN as usize]);
        self.has(byte)
    }

    /// Zeroes them.
    fn zero(&mut self, flags: u8) -> bool {
        self.ask(WRITE_ZEROES, flags, AT, LEN, &[]);
        self.has(0)
    }

    /// Trims them, which here makes zeroes of them.
    fn trim(&mut self, flags: u8) -> bool {
        self.ask(TRIM, flags, AT, LEN, &[]);
        self.has(0)
    }

    fn flush(&mut self) {
        self.ask(FLUSH, 0, 0, 0, &[]);
    }

    fn has(&self, byte: u8) -> bool {
        self.disk.after_cut(AT, LEN as usize) == [byte; LEN as usize]
    }
}

#[test]
fn flushed_data_survives() {
    for format in Format::ALL {
        let mut server = Server::new("flushed", format, 1, false);
        assert!(!server.write(0, 1), "a cache that keeps nothing back tests nothing");
        server.flush();
        assert!(server.has(1), "{format:?}");
        for flags in [0, NO_HOLE] {
            server.write(FUA, 1);
            assert!(!server.zero(flags), "{format:?}");
            server.flush();
            assert!(server.has(0), "{format:?}, {flags}");
        }
        server.write(FUA, 1);
        assert!(!server.trim(0), "{format:?}");
        server.flush();
        assert!(server.has(0), "{format:?}");
    }
}

#[test]
fn writes_with_forced_unit_access_survive() {
    for format in Format::ALL {
        let mut server = Server::new("fua", format, 1, false);
        assert!(server.write(FUA, 1), "{format:?}");
        for flags in [0, NO_HOLE] {
            assert!(server.write(FUA, 1), "{format:?}");
            assert!(server.zero(FUA | flags), "{format:?}, {flags}");
        }
        assert!(server.write(FUA, 1), "{format:?}");
        assert!(server.trim(FUA), "{format:?}");
        assert!(!server.write(0, 2), "{format:?}: without");
    }
}

#[test]
fn a_write_through_export_needs_no_flags() {
    for format in Format::ALL {
        let mut server = Server::new("through", format, 1, true);
        assert!(server.write(0, 1), "{format:?}");
        for flags in [0, NO_HOLE] {
            assert!(server.write(0, 1), "{format:?}");
            assert!(server.zero(flags), "{format:?}, {flags}");
        }
        assert!(server.write(0, 1), "{format:?}");
        assert!(server.trim(0), "{format:?}");
    }
}

/// Connections on the same thread and on different ones.
#[test]
fn a_flush_is_good_for_all_connections() {
    for format in Format::ALL {
        for loops in [1, 2] {
            let name = format!("connections-{loops}");
            let mut server = Server::new(&name, format, loops, false);
            assert_ne!(server.rig.flags & CAN_MULTI_CONN, 0);
            let mut other = server.rig.connect();
            for byte in 1..4 {
                assert!(!server.write(0, byte), "{format:?}, {loops}");
                std::mem::swap(&mut server.rig.client, &mut other);
                server.flush();
                assert!(server.has(byte), "{format:?}, {loops} threads");
            }
        }
    }
}
