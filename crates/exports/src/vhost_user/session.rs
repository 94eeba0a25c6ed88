//! The state that front end and back end have negotiated: a state machine without threads or sockets.
//!
//! [`Session::handle`] takes a message and returns an action. The results of
//! actions come back through [`Session::ring_started`], [`Session::ring_stopped`] and
//! [`Session::rings_reset`], so that a failed action does not change the session.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use devices::virtio::CacheRecord;
use guest_memory::Region;
use queue::QueueConfig;

use super::descriptors::is_unix_stream;
use super::device::Device;
use super::error::SessionError;
use super::eventfd::EventFd;
use super::handover::Saved;
use super::wire::{
    InflightDescription, LogDescription, Message, RegionId, Reply, Request, VringAddr,
};

/// Feature bit of vhost: log writes to the guest's memory.
pub const VHOST_F_LOG_ALL: u64 = 1 << 26;
/// VIRTIO_F_INDIRECT_DESC (virtio 1.3, section 6).
pub const VIRTIO_F_RING_INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX (virtio 1.3, section 6).
pub const VIRTIO_F_RING_EVENT_IDX: u64 = 1 << 29;
/// Feature bit of vhost-user: there are protocol features.
pub const VHOST_USER_F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// VIRTIO_F_VERSION_1 (virtio 1.3, section 6).
pub const VIRTIO_F_VERSION_1: u64 = 1 << 32;

/// Features that the server adds to those of the device.
const RING_FEATURES: u64 = VHOST_F_LOG_ALL
    | VIRTIO_F_RING_INDIRECT_DESC
    | VIRTIO_F_RING_EVENT_IDX
    | VHOST_USER_F_PROTOCOL_FEATURES
    | VIRTIO_F_VERSION_1;

/// Features that do not concern the device.
const NOT_THE_DEVICES: u64 = VHOST_F_LOG_ALL | VHOST_USER_F_PROTOCOL_FEATURES;

/// Protocol feature bits.
pub mod protocol_features {
    /// Several queues: GET_QUEUE_NUM.
    pub const MQ: u64 = 1 << 0;
    /// SET_LOG_BASE with a descriptor.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// Acknowledgements at the front end's request.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// SET_BACKEND_REQ_FD.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// GET_CONFIG, SET_CONFIG.
    pub const CONFIG: u64 = 1 << 9;
    /// GET_INFLIGHT_FD, SET_INFLIGHT_FD.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// RESET_DEVICE.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// ADD_MEM_REG, REM_MEM_REG, GET_MAX_MEM_SLOTS.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// GET_STATUS, SET_STATUS.
    pub const STATUS: u64 = 1 << 16;

    /// Features of devices whose configuration space the front end reads.
    ///
    /// The back end answers. The socket of BACKEND_REQ only carries changes of that space.
    pub const OF_CONFIG: u64 = CONFIG | BACKEND_REQ;

    /// All offered features.
    pub const OFFERED: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS
        | STATUS;
}

/// Maximum number of memory regions of a session.
///
/// The classic number of KVM's memory slots, less those that QEMU uses itself.
pub const MAX_MEM_SLOTS: usize = 509;

/// Maximum number of entries of a queue, the same as in QEMU.
///
/// Each entry costs memory when the queue starts, so the size is bounded.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// The next step after a message.
#[derive(Debug)]
pub enum Step {
    /// None.
    Done,
    /// Send a reply.
    Reply(Reply),
    /// Carry out an action first.
    Do(Action),
}

/// An action outside of the session.
#[derive(Debug)]
pub enum Action {
    /// Log a deviation that is served.
    Note(String),
    /// Replace all regions.
    SetMemory(Vec<Region>),
    /// Add a region.
    AddRegion(Region),
    /// Remove a region; afterwards nothing uses it.
    RemoveRegion(RegionId),
    /// Start a ring, then call [`Session::ring_started`]. A running ring is stopped first and continues
    /// where it was.
    StartRing {
        /// Index of the ring.
        index: u16,
        /// Its setup.
        setup: RingSetup,
    },
    /// Stop a running ring and finish requests in flight, then call [`Session::ring_stopped`] for
    /// the reply.
    StopRing {
        /// Index of the ring.
        index: u16,
    },
    /// Replace the call eventfd of a ring, and signal the new one: an earlier publication may not have
    /// been noticed.
    SetCall {
        /// Index of the ring, which may be stopped.
        index: u16,
        /// The new one.
        call: Option<EventFd>,
    },
    /// Replace the err eventfd of a ring.
    SetErr {
        /// Index of the ring, which may be stopped.
        index: u16,
        /// The new one.
        err: Option<EventFd>,
    },
    /// Enable or disable a running ring.
    SetEnabled {
        /// Index of the ring.
        index: u16,
        /// On or off.
        enabled: bool,
    },
    /// Create memory for the in-flight records of that many rings, with `queue_size` entries or more,
    /// and send it with [`Reply::Inflight`].
    CreateInflight {
        /// Rings.
        num_queues: u16,
        /// Entries of each.
        queue_size: u16,
        /// Bytes of the reply's payload.
        payload_len: usize,
    },
    /// Keep in-flight records in this memory. It may contain requests that have to be repeated.
    SetInflight {
        /// Its size and place.
        description: InflightDescription,
        /// The memory.
        fd: OwnedFd,
    },
    /// Use this memory for the log of a migration. Afterwards nothing is written to the previous
    /// memory. Then answer with [`Reply::Log`].
    SetLogBase {
        /// Its size and place.
        description: LogDescription,
        /// The memory.
        fd: OwnedFd,
    },
    /// The eventfd to signal after an entry in the log.
    SetLogFd(EventFd),
    /// Start or stop logging of writes to the guest's memory. It takes effect for writes that end later,
    /// once there is memory for the log. Then call [`Session::logging_set`].
    SetLogging(bool),
    /// Log writes to the used ring of a running ring under this guest address, or stop that.
    SetUsedLog {
        /// Index of the ring.
        index: u16,
        /// The guest address.
        addr: Option<u64>,
    },
    /// Report changes of the configuration space on this socket.
    TellChanges(OwnedFd),
    /// Stop all rings, then call [`Session::rings_reset`].
    ResetRings(Reset),
}

/// The message that resets the rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reset {
    /// RESET_DEVICE: the driver no longer waits for its requests.
    Device,
    /// SET_STATUS 0, from a driver's reset, or from a front end that stops its guest.
    Status,
}

/// Everything that starting a ring needs, except the memory.
#[derive(Debug, Clone)]
pub struct RingSetup {
    /// Size, addresses, features, base.
    pub config: QueueConfig,
    /// The base is the one at which the ring was stopped, here or in the previous process. Otherwise it is the
    /// front end's choice.
    pub was_stopped: bool,
    /// The driver was reset in this session, and begins elsewhere: recorded requests are obsolete.
    pub is_new: bool,
    /// Signalled by the driver for new buffers; without it the ring is polled.
    pub kick: Option<EventFd>,
    /// Signalled for used buffers; without it the driver polls.
    pub call: Option<EventFd>,
    /// Signalled when the ring breaks.
    pub err: Option<EventFd>,
    /// Whether buffers are taken from the ring.
    pub enabled: bool,
    /// Guest address for the log of writes to the used ring.
    pub used_log: Option<u64>,
}

impl RingSetup {
    /// Continues at `base`, where the ring was stopped.
    pub(crate) fn continues_at(&mut self, base: u16) {
        (self.config.next_avail, self.was_stopped, self.is_new) = (base, true, false);
    }
}

/// The front end's settings of a ring.
#[derive(Debug, Default)]
struct Ring {
    num: Option<u16>,
    addr: Option<VringAddr>,
    /// Where the ring begins: the front end's word, or where it was stopped. `None`: neither since the last reset.
    base: Option<u16>,
    /// The base at which it was stopped.
    stopped_at: Option<u16>,
    /// The base at the last reset, until the ring is started again.
    reset_at: Option<u16>,
    call: Option<EventFd>,
    err: Option<EventFd>,
    /// `None`: not set; the default depends on the features.
    enabled: Option<bool>,
    running: bool,
}

impl Ring {
    /// The available index at which the ring begins.
    fn begins_at(&self) -> u16 {
        self.base.unwrap_or(0)
    }
}

/// A session with one front end.
pub struct Session {
    device: Arc<dyn Device>,
    features: u64,
    protocol_features: u64,
    status: u8,
    rings: Vec<Ring>,
    /// The write cache mode belongs to the present guest: the front end has read the configuration space,
    /// a ring has run, or the in-flight record has the mode.
    is_settled: bool,
}

impl Session {
    /// Returns a new session.
    pub fn new(device: Arc<dyn Device>) -> Self {
        device.set_features(0);
        let rings = (0..device.num_queues()).map(|_| Ring::default()).collect();
        Session { device, features: 0, protocol_features: 0, status: 0, rings, is_settled: false }
    }

    /// Returns whether the front end may ask for acknowledgements.
    pub fn has_reply_ack(&self) -> bool {
        self.protocol_features & protocol_features::REPLY_ACK != 0
    }

    /// Handles a message. After an error the session is unchanged.
    ///
    /// # Errors
    ///
    /// The message does not fit the negotiated state.
    pub fn handle(&mut self, message: Message) -> Result<Step, SessionError> {
        Ok(match message {
            Message::GetFeatures => Step::Reply(Reply::U64(self.offered())),
            Message::SetFeatures(features) => self.set_features(features)?,
            // The connected front end owns the session; the specification says to ignore RESET_OWNER.
            Message::SetOwner | Message::ResetOwner => Step::Done,
            Message::GetProtocolFeatures => {
                Step::Reply(Reply::U64(self.offered_protocol_features()))
            }
            Message::SetProtocolFeatures(features) => {
                // A session from another process may come from a version that offered all features for
                // any device.
                let unknown = features & !protocol_features::OFFERED;
                if unknown != 0 {
                    return Err(SessionError::ProtocolFeatures(unknown));
                }
                self.protocol_features = features;
                Step::Done
            }
            Message::GetQueueNum => Step::Reply(Reply::U64(self.rings.len() as u64)),
            Message::GetMaxMemSlots => Step::Reply(Reply::U64(MAX_MEM_SLOTS as u64)),
            Message::SetMemTable(regions) => Step::Do(Action::SetMemory(regions)),
            Message::AddMemReg(region) => Step::Do(Action::AddRegion(region)),
            Message::RemMemReg(region) => Step::Do(Action::RemoveRegion(region)),
            Message::SetVringNum { index, num } => {
                if num > MAX_QUEUE_SIZE {
                    return Err(SessionError::QueueSize(num));
                }
                let (index, ring) = self.ring(index)?;
                if ring.running && ring.num != Some(num) {
                    return Err(SessionError::Running { index });
                }
                ring.num = Some(num);
                Step::Done
            }
            Message::SetVringAddr { index, addr } => {
                let (index, ring) = self.ring(index)?;
                let before = ring.addr.map(|addr| VringAddr { log: None, ..addr });
                if ring.running && before != Some(VringAddr { log: None, ..addr }) {
                    return Err(SessionError::Running { index });
                }
                let log_before = ring.addr.replace(addr).and_then(|addr| addr.log);
                match ring.running && log_before != addr.log {
                    true => Step::Do(Action::SetUsedLog { index, addr: addr.log }),
                    false => Step::Done,
                }
            }
            Message::SetVringBase { index, base } => {
                let (index, ring) = self.ring(index)?;
                if ring.running {
                    return Err(SessionError::Running { index });
                }
                ring.base = Some(base);
                Step::Done
            }
            Message::GetVringBase { index } => {
                let (index, ring) = self.ring(index)?;
                if ring.running {
                    return Ok(Step::Do(Action::StopRing { index }));
                }
                if let (None, Some(base)) = (ring.base, ring.reset_at) {
                    // QEMU before 8.0 resets the device first.
                    (ring.base, ring.stopped_at) = (Some(base), Some(base));
                }
                let base = ring.begins_at();
                Step::Reply(Reply::VringState { index: index.into(), num: base.into() })
            }
            Message::SetVringKick { index, fd } => {
                let (index, _) = self.ring(index)?;
                let kick = fd.map(EventFd::new).transpose()?;
                let setup = self.ring_setup(index, kick)?;
                Step::Do(Action::StartRing { index, setup })
            }
            Message::SetVringCall { index, fd } => {
                let (index, ring) = self.ring(index)?;
                let call = fd.map(EventFd::new).transpose()?;
                ring.call = call.clone();
                Step::Do(Action::SetCall { index, call })
            }
            Message::SetVringErr { index, fd } => {
                let (index, ring) = self.ring(index)?;
                let err = fd.map(EventFd::new).transpose()?;
                ring.err = err.clone();
                Step::Do(Action::SetErr { index, err })
            }
            Message::SetVringEnable { index, enable: enabled } => {
                let (index, ring) = self.ring(index)?;
                ring.enabled = Some(enabled);
                match ring.running {
                    true => Step::Do(Action::SetEnabled { index, enabled }),
                    false => Step::Done,
                }
            }
            Message::SetBackendReqFd(socket) => {
                // Messages on this socket must be sent without waiting, whatever file it is.
                if !is_unix_stream(&socket) {
                    return Err(SessionError::NotSocket);
                }
                match self.protocol_features & protocol_features::CONFIG {
                    // Changes of the configuration space are the only messages.
                    0 => Step::Done,
                    _ => Step::Do(Action::TellChanges(socket)),
                }
            }
            Message::GetConfig { offset, size, flags } => {
                Step::Reply(Reply::Config { offset, flags, data: self.read_config(offset, size) })
            }
            Message::SetConfig { offset, data, writer: _ } => {
                match self.device.write_config(offset, &data).map_err(SessionError::Config)? {
                    None => Step::Done,
                    Some(ignored) => Step::Do(Action::Note(ignored)),
                }
            }
            Message::GetInflightFd { num_queues, queue_size, payload_len } => {
                if usize::from(num_queues) > self.rings.len() {
                    let (index, num_queues) = (num_queues.into(), self.rings.len());
                    return Err(SessionError::QueueIndex { index, num_queues });
                }
                if queue_size > MAX_QUEUE_SIZE {
                    return Err(SessionError::QueueSize(queue_size));
                }
                Step::Do(Action::CreateInflight { num_queues, queue_size, payload_len })
            }
            Message::SetLogBase { description, fd } => {
                if self.protocol_features & protocol_features::LOG_SHMFD == 0 {
                    return Err(SessionError::Log);
                }
                Step::Do(Action::SetLogBase { description, fd })
            }
            Message::SetLogFd(fd) => Step::Do(Action::SetLogFd(EventFd::new(fd)?)),
            Message::SetInflightFd { description, fd } => {
                if description.queue_size > MAX_QUEUE_SIZE {
                    return Err(SessionError::QueueSize(description.queue_size));
                }
                if let Some(index) = self.rings.iter().position(|ring| ring.running) {
                    return Err(SessionError::Running { index: index as u16 });
                }
                Step::Do(Action::SetInflight { description, fd })
            }
            Message::SetStatus(0) => Step::Do(Action::ResetRings(Reset::Status)),
            Message::ResetDevice => Step::Do(Action::ResetRings(Reset::Device)),
            Message::SetStatus(status) => {
                self.status = status;
                Step::Done
            }
            Message::GetStatus => Step::Reply(Reply::U64(self.status.into())),
        })
    }

    /// Records new memory for in-flight records.
    ///
    /// With the memory's record of the write cache mode, if any.
    pub fn inflight_set(&mut self, write_cache: Option<CacheRecord>) {
        self.is_settled |= self.device.keep_write_cache(write_cache);
    }

    /// Records that the ring with the number `index` was started.
    pub fn ring_started(&mut self, index: u16) {
        self.is_settled = true;
        if let Some(ring) = self.rings.get_mut(usize::from(index)) {
            (ring.running, ring.reset_at) = (true, None);
        }
    }

    /// Records that the ring with the number `index` was stopped at `base`.
    ///
    /// `base` is the index of the next available entry. `None`: the ring did not run. Returns the reply to
    /// GET_VRING_BASE.
    ///
    /// Releases its kick and call eventfds, as other back ends do: the front end sends new
    /// ones before it starts the ring again.
    pub fn ring_stopped(&mut self, index: u16, base: Option<u16>) -> Reply {
        let mut num = 0;
        if let Some(ring) = self.rings.get_mut(usize::from(index)) {
            ring.running = false;
            ring.base = base.or(ring.base);
            ring.stopped_at = base;
            ring.call = None;
            num = ring.begins_at().into();
        }
        Reply::VringState { index: index.into(), num }
    }

    /// Records that the previous process stopped a ring at `base`; the ring is not started yet.
    ///
    /// # Errors
    ///
    /// There is no such ring.
    pub(crate) fn stopped_elsewhere(&mut self, index: u32, base: u16) -> Result<(), SessionError> {
        let (_, ring) = self.ring(index)?;
        (ring.base, ring.stopped_at) = (Some(base), Some(base));
        Ok(())
    }

    /// Records that writes are logged, or no longer logged.
    pub fn logging_set(&mut self, on: bool) {
        self.features &= !VHOST_F_LOG_ALL;
        if on {
            self.features |= VHOST_F_LOG_ALL;
        }
    }

    /// Records that all rings were stopped for a reset of the device, those that ran at `bases`.
    ///
    /// The rings begin at 0, unless the front end says otherwise. GET_VRING_BASE still returns where they were
    /// stopped: QEMU before 8.0 asks after it has set status 0, to stop its guest.
    ///
    /// Memory and protocol features belong to the connection and stay. The write cache mode and the rest of
    /// the configuration space stay too, because a front end answers its guest from what it has read, and
    /// would not learn of a change.
    pub fn rings_reset(&mut self, bases: &[(u16, u16)]) {
        for (index, ring) in (0..).zip(&mut self.rings) {
            let running = bases.iter().find(|base| base.0 == index).map(|base| base.1);
            let stopped_at = running.or(ring.stopped_at);
            // `None`: the ring never ran in this session, so the reset concerns no record.
            let reset_at = running.or(ring.reset_at).or(stopped_at);
            *ring = Ring { stopped_at, reset_at, ..Ring::default() };
        }
        self.features = 0;
        self.status = 0;
        self.device.set_features(0);
    }

    /// The messages for features and rings, without those that start rings.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(crate) fn save(&self) -> io::Result<Vec<Saved>> {
        let mut saved = Vec::new();
        if self.is_settled {
            saved.push(Saved::config_seen());
        }
        saved.push(Saved::u64(Request::SetProtocolFeatures, self.protocol_features));
        saved.push(Saved::u64(Request::SetFeatures, self.features));
        if self.status != 0 {
            saved.push(Saved::u64(Request::SetStatus, self.status.into()));
        }
        for (index, ring) in (0..).zip(&self.rings) {
            if let Some(num) = ring.num {
                saved.push(Saved::ring(Request::SetVringNum, index, num.into()));
            }
            if let Some(VringAddr { desc, avail, used, log }) = ring.addr {
                let words = [u32::from(index), log.is_some().into()].map(u32::to_ne_bytes);
                let first = words.as_flattened().try_into().map_or(0, u64::from_ne_bytes);
                let fields = [first, desc, used, avail, log.unwrap_or(0)];
                saved.push(Saved::fields(Request::SetVringAddr, &fields, Vec::new()));
            }
            if let Some(base) = ring.base.or(ring.reset_at) {
                saved.push(Saved::ring(Request::SetVringBase, index, base.into()));
            }
            if let Some(call) = &ring.call {
                saved.push(Saved::ring_fd(Request::SetVringCall, index, Some(call))?);
            }
            if let Some(err) = &ring.err {
                saved.push(Saved::ring_fd(Request::SetVringErr, index, Some(err))?);
            }
            if let Some(enabled) = ring.enabled {
                saved.push(Saved::ring(Request::SetVringEnable, index, enabled.into()));
            }
        }
        Ok(saved)
    }

    fn offered(&self) -> u64 {
        self.device.features() | RING_FEATURES
    }

    fn offered_protocol_features(&self) -> u64 {
        match self.device.has_config() {
            true => protocol_features::OFFERED,
            false => protocol_features::OFFERED & !protocol_features::OF_CONFIG,
        }
    }

    fn set_features(&mut self, features: u64) -> Result<Step, SessionError> {
        let unknown = features & !self.offered();
        if unknown != 0 {
            return Err(SessionError::Features(unknown));
        }
        let changed = features ^ self.features;
        if changed & !VHOST_F_LOG_ALL != 0
            && let Some(index) = self.rings.iter().position(|ring| ring.running)
        {
            return Err(SessionError::Running { index: index as u16 });
        }
        self.features = features ^ (changed & VHOST_F_LOG_ALL);
        self.device.set_features(features & !NOT_THE_DEVICES);
        Ok(match changed & VHOST_F_LOG_ALL {
            0 => Step::Done,
            _ => Step::Do(Action::SetLogging(features & VHOST_F_LOG_ALL != 0)),
        })
    }

    fn ring(&mut self, index: u32) -> Result<(u16, &mut Ring), SessionError> {
        let num_queues = self.rings.len();
        let out_of_range = SessionError::QueueIndex { index, num_queues };
        let Ok(short) = u16::try_from(index) else { return Err(out_of_range) };
        let ring = self.rings.get_mut(usize::from(short)).ok_or(out_of_range)?;
        Ok((short, ring))
    }

    fn ring_setup(&mut self, index: u16, kick: Option<EventFd>) -> Result<RingSetup, SessionError> {
        let features = self.features;
        let (_, ring) = self.ring(index.into())?;
        let size = ring.num.ok_or(SessionError::Incomplete { index, missing: "SET_VRING_NUM" })?;
        let addr =
            ring.addr.ok_or(SessionError::Incomplete { index, missing: "SET_VRING_ADDR" })?;
        let enabled = ring.enabled.unwrap_or(features & VHOST_USER_F_PROTOCOL_FEATURES == 0);
        Ok(RingSetup {
            config: QueueConfig {
                size,
                desc: addr.desc,
                avail: addr.avail,
                used: addr.used,
                event_idx: features & VIRTIO_F_RING_EVENT_IDX != 0,
                indirect: features & VIRTIO_F_RING_INDIRECT_DESC != 0,
                next_avail: ring.begins_at(),
                index,
            },
            // Another base is the front end's decision.
            was_stopped: ring.stopped_at == Some(ring.begins_at()),
            is_new: ring.reset_at.is_some_and(|at| at != ring.begins_at()),
            kick,
            call: ring.call.clone(),
            err: ring.err.clone(),
            enabled,
            used_log: addr.log,
        })
    }

    /// Reads configuration space. Bytes beyond its end are 0, for front ends with fields that
    /// the device does not have.
    fn read_config(&mut self, offset: u32, size: u32) -> Vec<u8> {
        if !self.is_settled {
            // A read before the first start means a new guest, so the mode of the previous front end is
            // dropped. A front end that reconnects under a running guest does not read first, and keeps
            // the mode that its guest has set, even if it reads later with stopped rings.
            self.is_settled = true;
            self.device.reset();
            self.device.set_features(self.features & !NOT_THE_DEVICES);
        }
        let space = self.device.config_space();
        let from = space.get(offset as usize..).unwrap_or_default();
        let mut data: Vec<u8> = from.iter().copied().take(size as usize).collect();
        data.resize(size as usize, 0);
        data
    }
}
