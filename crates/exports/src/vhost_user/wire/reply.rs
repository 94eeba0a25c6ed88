//! Replies.

use super::{FLAG_REPLY, HEADER_LEN, InflightDescription, LogDescription, VERSION};

/// What a request is answered with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A number, or an acknowledgement: 0 for success.
    U64(u64),
    /// GET_VRING_BASE.
    VringState {
        /// The queue's index.
        index: u32,
        /// Index of the next available entry.
        num: u32,
    },
    /// GET_CONFIG.
    Config {
        /// First byte, as in the request.
        offset: u32,
        /// Flags, as in the request.
        flags: u32,
        /// The bytes; as many as were asked for.
        data: Vec<u8>,
    },
    /// GET_INFLIGHT_FD; the descriptor goes along with it.
    Inflight {
        /// What was made.
        description: InflightDescription,
        /// Bytes of the request's payload: front ends that have padding in it want it back.
        payload_len: usize,
    },
    /// SET_LOG_BASE, with the protocol feature LOG_SHMFD. The specification names no payload; the
    /// front ends of rust-vmm's want the request's own, others look at none.
    Log(LogDescription),
    /// GET_CONFIG that cannot be answered: no payload.
    Nothing,
}

impl Reply {
    /// A request was carried out.
    pub const ACK: Reply = Reply::U64(0);
    /// A request failed.
    pub const NACK: Reply = Reply::U64(1);

    /// Returns the reply's bytes, header first, to the request with number `code`.
    pub fn encode(&self, code: u32) -> Vec<u8> {
        let mut payload = Vec::new();
        match self {
            Reply::U64(value) => payload.extend(value.to_ne_bytes()),
            Reply::VringState { index, num } => {
                payload.extend(index.to_ne_bytes());
                payload.extend(num.to_ne_bytes());
            }
            Reply::Config { offset, flags, data } => {
                payload.extend(offset.to_ne_bytes());
                payload.extend((data.len() as u32).to_ne_bytes());
                payload.extend(flags.to_ne_bytes());
                payload.extend(data);
            }
            Reply::Inflight { description, payload_len } => {
                let InflightDescription { mmap_size, mmap_offset, num_queues, queue_size } =
                    description;
                payload.extend(mmap_size.to_ne_bytes());
                payload.extend(mmap_offset.to_ne_bytes());
                payload.extend(num_queues.to_ne_bytes());
                payload.extend(queue_size.to_ne_bytes());
                payload.resize(*payload_len, 0);
            }
            Reply::Log(LogDescription { mmap_size, mmap_offset }) => {
                payload.extend(mmap_size.to_ne_bytes());
                payload.extend(mmap_offset.to_ne_bytes());
            }
            Reply::Nothing => {}
        }
        let mut bytes = Vec::with_capacity(HEADER_LEN + payload.len());
        bytes.extend(code.to_ne_bytes());
        bytes.extend((VERSION | FLAG_REPLY).to_ne_bytes());
        bytes.extend((payload.len() as u32).to_ne_bytes());
        bytes.extend(payload);
        bytes
    }
}
