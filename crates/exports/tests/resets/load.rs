//! The driver's requests: one for each place of its queues. Each place has its own part of the disk.

use fastrand::Rng;
use queue::Segment;

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// Places of all queues, which is the most requests in flight.
pub(crate) const PLACES: usize = 64;
/// Sectors of the disk per place.
pub(crate) const OWN: usize = 32;
/// Bytes of the disk.
pub(crate) const DISK: u64 = (PLACES * OWN * SECTOR) as u64;
/// Bytes of memory per place: a header, a response, and then data.
pub(crate) const ROOM: usize = 24 << 10;
const RESPONSE: usize = 0x400;
const DATA: usize = 0x1000;
/// Byte that fills all buffers before a request.
pub(crate) const UNWRITTEN: u8 = 0xee;

/// `struct virtio_scsi_cmd_req` and `_resp`, with a CDB and sense data of the sizes that drivers have by default.
const SCSI_REQUEST: usize = 51;
const SCSI_RESPONSE: usize = 108;
/// SCSI status and sense key.
const CHECK_CONDITION: u8 = 2;
const UNIT_ATTENTION: u8 = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    Blk,
    Scsi,
}

/// Returns a sector's contents by their number. 0: zeroes.
pub(crate) fn contents(number: u64) -> [u8; SECTOR] {
    let word = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = [word.to_le_bytes(); SECTOR / 8];
    words.as_flattened().try_into().expect("as many bytes")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Zeroes,
    /// WRITE SAME: the same contents in all sectors, from one buffer.
    Same,
    Flush,
}

/// A request in a place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    device: Device,
    kind: Kind,
    /// First sector, and number of sectors.
    first: usize,
    sectors: usize,
    /// Offset of the data from the start of a page, bytes.
    lead: usize,
    /// Number of the first sector's contents. Numbers of the next sectors count up.
    number: u64,
}

impl Request {
    /// Returns a random request for `place`. `number` must be unique.
    pub(crate) fn any(random: &mut Rng, device: Device, place: usize, number: u64) -> Self {
        let kinds = [Kind::Read, Kind::Read, Kind::Write, Kind::Write, Kind::Zeroes, Kind::Flush];
        let kind = match random.u8(..8) {
            7 if device == Device::Scsi => Kind::Same,
            n => kinds[n as usize % kinds.len()],
        };
        let sectors = [1, 8, 16, 32][random.usize(..4)];
        let first = place * OWN + random.usize(..=OWN - sectors);
        // Aligned for direct I/O, or not, which takes a bounce buffer.
        let lead = [0, 0, 512, 1][random.usize(..4)];
        Request { device, kind, first, sectors, lead, number }
    }

    /// Returns a read of the place's whole part of the disk.
    pub(crate) fn read_all(device: Device, place: usize) -> Self {
        let (first, sectors) = (place * OWN, OWN);
        Request { device, kind: Kind::Read, first, sectors, lead: 0, number: 0 }
    }

    fn number_of(&self, sector: usize) -> u64 {
        match self.kind {
            Kind::Same => self.number,
            _ => self.number + sector as u64,
        }
    }

    /// Returns the data that the device reads after the header.
    fn output(&self) -> Vec<u8> {
        let write_zeroes = || {
            const UNMAP: u32 = 1;
            let fields = [self.sectors as u32, UNMAP].map(u32::to_le_bytes);
            [(self.first as u64).to_le_bytes().as_slice(), fields.as_flattened()].concat()
        };
        match (self.kind, self.device) {
            (Kind::Read | Kind::Flush, _) => Vec::new(),
            (Kind::Write, _) => {
                (0..self.sectors).flat_map(|sector| contents(self.number_of(sector))).collect()
            }
            (Kind::Zeroes, Device::Blk) => write_zeroes(),
            (Kind::Zeroes, Device::Scsi) => vec![0; SECTOR],
            (Kind::Same, _) => contents(self.number).to_vec(),
        }
    }

    fn header(&self) -> Vec<u8> {
        match self.device {
            Device::Blk => {
                let kind: u32 = match self.kind {
                    Kind::Read => 0,
                    Kind::Write | Kind::Same => 1,
                    Kind::Flush => 4,
                    Kind::Zeroes => 13,
                };
                let sector = if kind < 2 { self.first as u64 } else { 0 };
                [kind.to_le_bytes().as_slice(), &[0; 4], &sector.to_le_bytes()].concat()
            }
            Device::Scsi => {
                const UNMAP: u8 = 8;
                // To LUN 0 of target 0.
                let mut header = vec![1, 0, 0x40, 0, 0, 0, 0, 0];
                header.resize(19, 0);
                let short = |code: u8| {
                    let lba = (self.first as u32).to_be_bytes();
                    let len = (self.sectors as u16).to_be_bytes();
                    [&[code, 0], lba.as_slice(), &[0], &len, &[0]].concat()
                };
                let same = |flags: u8| {
                    let lba = (self.first as u64).to_be_bytes();
                    let len = (self.sectors as u32).to_be_bytes();
                    [&[0x93, flags], lba.as_slice(), &len, &[0, 0]].concat()
                };
                header.extend(match self.kind {
                    Kind::Read => short(0x28),
                    Kind::Write => short(0x2a),
                    Kind::Zeroes => same(UNMAP),
                    Kind::Same => same(0),
                    Kind::Flush => [&[0x35], [0; 9].as_slice()].concat(),
                });
                header.resize(SCSI_REQUEST, 0);
                header
            }
        }
    }

    fn response_len(&self) -> usize {
        match self.device {
            Device::Blk => 1,
            Device::Scsi => SCSI_RESPONSE,
        }
    }

    fn input_len(&self) -> usize {
        if self.kind == Kind::Read { self.sectors * SECTOR } else { 0 }
    }

    /// Writes the header and the data into the place's memory.
    pub(crate) fn put(&self, room: &mut [u8]) {
        let mut put = |at: usize, bytes: &[u8]| room[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.header());
        put(DATA + self.lead, &self.output());
    }

    /// Returns readable and writable buffers in memory that begins at guest address `at`.
    pub(crate) fn buffers(&self, at: u64) -> [Vec<Segment>; 2] {
        let segment =
            |offset: usize, len: usize| Segment { addr: at + offset as u64, len: len as u32 };
        let data = |len| [segment(DATA + self.lead, len)].into_iter().filter(move |_| len > 0);
        let response = [segment(RESPONSE, self.response_len())];
        let readable =
            [segment(0, self.header().len())].into_iter().chain(data(self.output().len()));
        let input = data(self.input_len());
        let writable = match self.device {
            Device::Blk => input.chain(response).collect(),
            Device::Scsi => response.into_iter().chain(input).collect(),
        };
        [readable.collect(), writable]
    }

    /// Whether the device has written a response here.
    pub(crate) fn is_answered(&self, room: &[u8]) -> bool {
        room[RESPONSE] != UNWRITTEN
    }

    /// Checks the response. Updates `disk`, the numbers of the contents, by a completed write.
    pub(crate) fn check(&self, room: &[u8], disk: &mut [u64]) {
        let answer = &room[RESPONSE..][..self.response_len()];
        let status = match self.device {
            Device::Blk => answer,
            // After a reset a logical unit answers one command with a unit attention, without doing
            // the command.
            Device::Scsi if answer[10] == CHECK_CONDITION && answer[14] == UNIT_ATTENTION => return,
            Device::Scsi => &answer[10..12],
        };
        assert!(status.iter().all(|byte| *byte == 0), "{self:?}: status {status:?}");
        let input = &room[DATA + self.lead..][..self.input_len()];
        for (sector, number) in disk[self.first..][..self.sectors].iter_mut().enumerate() {
            match self.kind {
                Kind::Read => {
                    let found = &input[sector * SECTOR..][..SECTOR];
                    let (at, first) = (self.first + sector, &found[..8]);
                    assert!(*found == contents(*number), "{self:?}: sector {at}: {first:x?}…");
                }
                Kind::Write | Kind::Same => *number = self.number_of(sector),
                Kind::Zeroes => *number = 0,
                Kind::Flush => {}
            }
        }
    }
}
