//! Layouts and numbers of the virtio specification, section 5.6.

/// Feature bits (5.6.3).
pub(crate) const VIRTIO_SCSI_F_CHANGE: u32 = 2;

/// The queues before the request queues (5.6.2): control and event.
pub(crate) const CONTROL_QUEUE: u16 = 0;
pub(crate) const EVENT_QUEUE: u16 = 1;
/// Index of the first request queue, and number of other queues (5.6.2).
pub const FIRST_REQUEST_QUEUE: u16 = 2;

/// Length of a CDB and of sense data in requests. A driver may change them in the configuration space (5.6.4).
/// This device, like other vhost back ends, keeps them fixed.
pub(crate) const CDB_SIZE: usize = 32;
pub(crate) const SENSE_SIZE: usize = 96;

/// Length of a request before its data: address, identifier, three bytes of task attributes, CDB (5.6.6.1).
pub(crate) const REQUEST_SIZE: usize = 19 + CDB_SIZE;
/// Length of a response before its data.
pub(crate) const RESPONSE_SIZE: usize = 12 + SENSE_SIZE;
/// Length of an event (5.6.6.3).
pub(crate) const EVENT_SIZE: usize = 16;

/// Bytes of the configuration space (5.6.4).
pub const CONFIG_SIZE: usize = 36;
/// Offsets of `sense_size` and `cdb_size`, the only writable fields.
pub(crate) const CONFIG_SENSE_SIZE: usize = 20;
pub(crate) const CONFIG_CDB_SIZE: usize = 24;

/// Requests on the control queue (5.6.6.2).
pub(crate) const VIRTIO_SCSI_T_TMF: u32 = 0;
pub(crate) const VIRTIO_SCSI_T_AN_QUERY: u32 = 1;
pub(crate) const VIRTIO_SCSI_T_AN_SUBSCRIBE: u32 = 2;

/// Task management functions.
pub(crate) const VIRTIO_SCSI_T_TMF_ABORT_TASK: u32 = 0;
pub(crate) const VIRTIO_SCSI_T_TMF_ABORT_TASK_SET: u32 = 1;
pub(crate) const VIRTIO_SCSI_T_TMF_CLEAR_ACA: u32 = 2;
pub(crate) const VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET: u32 = 3;
pub(crate) const VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET: u32 = 4;
pub(crate) const VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET: u32 = 5;
pub(crate) const VIRTIO_SCSI_T_TMF_QUERY_TASK: u32 = 6;
pub(crate) const VIRTIO_SCSI_T_TMF_QUERY_TASK_SET: u32 = 7;

/// Events (5.6.6.3).
pub(crate) const VIRTIO_SCSI_T_PARAM_CHANGE: u32 = 3;

/// The transport's response to a request (5.6.6.1, 5.6.6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Response {
    /// `VIRTIO_SCSI_S_OK`, or `VIRTIO_SCSI_S_FUNCTION_COMPLETE` of a task management function.
    Ok = 0,
    /// The CDB transfers more data than the buffer has room for.
    Overrun = 1,
    Aborted = 2,
    BadTarget = 3,
    Reset = 4,
    Failure = 9,
    FunctionSucceeded = 10,
    FunctionRejected = 11,
    IncorrectLun = 12,
}

/// The address of a logical unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Address {
    /// A target that does not exist.
    OtherTarget,
    /// A logical unit of the only target, whether or not it exists; `None` for a number that no logical unit can
    /// have.
    Lun(Option<u16>),
}

impl Address {
    /// The number of a logical unit, or -1, for trace events.
    pub(crate) fn trace_lun(self) -> i64 {
        match self {
            Address::Lun(Some(number)) => number.into(),
            _ => -1,
        }
    }

    /// Parses a `lun` field: 1, the target, a single-level LUN (SAM-5, 4.7.4), zeroes. The only target is 0.
    pub(crate) fn from_bytes(bytes: [u8; 8]) -> Self {
        let [1, 0, high, low, rest @ ..] = bytes else { return Address::OtherTarget };
        Address::Lun(match high >> 6 {
            // Peripheral device addressing, on bus 0.
            0 if high == 0 && rest == [0; 4] => Some(low.into()),
            // Flat space addressing.
            1 if rest == [0; 4] => Some(u16::from_be_bytes([high & 0x3f, low])),
            _ => None,
        })
    }

    /// The `lun` field of a logical unit, for events.
    pub(crate) fn to_bytes(lun: u16) -> [u8; 8] {
        let [high, low] = lun.to_be_bytes();
        [1, 0, 0x40 | high, low, 0, 0, 0, 0]
    }
}

/// The fixed part of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) address: Address,
    /// The driver's identifier, unique among requests in flight.
    pub(crate) id: u64,
    pub(crate) cdb: [u8; CDB_SIZE],
}

impl Request {
    /// Task attributes, priority and CRN are ignored: drivers send SIMPLE, which permits any order, and the protocol
    /// does not number commands.
    pub(crate) fn from_bytes(bytes: [u8; REQUEST_SIZE]) -> Self {
        let (lun, rest) = split(&bytes);
        let (id, rest) = split(rest);
        let (_attributes, rest) = split::<3>(rest);
        let (cdb, _) = split(rest);
        Request { address: Address::from_bytes(lun), id: u64::from_le_bytes(id), cdb }
    }
}

/// Splits off the first `N` bytes, padded with 0.
fn split<const N: usize>(bytes: &[u8]) -> ([u8; N], &[u8]) {
    match bytes.split_first_chunk() {
        Some((first, rest)) => (*first, rest),
        None => ([0; N], &[]),
    }
}

/// A task management request, after its type (5.6.6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskManagement {
    pub(crate) function: u32,
    pub(crate) address: Address,
    pub(crate) id: u64,
}

impl TaskManagement {
    pub(crate) fn from_bytes(bytes: [u8; 20]) -> Self {
        let (function, rest) = split(&bytes);
        let (lun, rest) = split(rest);
        let (id, _) = split(rest);
        TaskManagement {
            function: u32::from_le_bytes(function),
            address: Address::from_bytes(lun),
            id: u64::from_le_bytes(id),
        }
    }
}

/// The fixed part of a response.
pub(crate) struct ResponseBytes(pub(crate) [u8; RESPONSE_SIZE]);

impl ResponseBytes {
    /// `residual`: bytes of the data buffer not used.
    pub(crate) fn new(response: Response, status: u8, residual: u32, sense: &[u8]) -> Self {
        let mut bytes = [0; RESPONSE_SIZE];
        let (fixed, room) = bytes.split_at_mut(12);
        let len = room.iter_mut().zip(sense).map(|(to, from)| *to = *from).count();
        fixed[..4].copy_from_slice(&(len as u32).to_le_bytes());
        fixed[4..8].copy_from_slice(&residual.to_le_bytes());
        // Bytes 8 and 9, the status qualifier, stay 0.
        fixed[10] = status;
        fixed[11] = response as u8;
        ResponseBytes(bytes)
    }
}

/// An event.
pub(crate) fn event(event: u32, lun: u16, reason: u32) -> [u8; EVENT_SIZE] {
    let mut bytes = [0; EVENT_SIZE];
    bytes[..4].copy_from_slice(&event.to_le_bytes());
    bytes[4..12].copy_from_slice(&Address::to_bytes(lun));
    bytes[12..].copy_from_slice(&reason.to_le_bytes());
    bytes
}

/// The configuration space (5.6.4).
pub(crate) struct Config {
    pub(crate) num_queues: u32,
    pub(crate) seg_max: u32,
    pub(crate) max_sectors: u32,
    pub(crate) cmd_per_lun: u32,
    pub(crate) max_lun: u32,
}

impl Config {
    pub(crate) fn to_bytes(&self) -> [u8; CONFIG_SIZE] {
        let words = [
            self.num_queues,
            self.seg_max,
            self.max_sectors,
            self.cmd_per_lun,
            EVENT_SIZE as u32,
            SENSE_SIZE as u32,
            CDB_SIZE as u32,
            // max_channel and max_target, 16 bits each: only target 0.
            0,
            self.max_lun,
        ];
        let mut bytes = [0; CONFIG_SIZE];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}
