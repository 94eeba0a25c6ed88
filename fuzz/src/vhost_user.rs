//! A vhost-user session with a hostile front end: messages and descriptors taken from the bytes.
//!
//! Each message goes the way it goes in the server: header, payload, session, and memory where it
//! is about memory. After each the session's promises are checked against what a front end knows.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::node::Watcher;
use event_loop::EventLoop;
use exports::vhost_user::device::{Device, DeviceOnLoop};
use exports::vhost_user::session::{Action, MAX_QUEUE_SIZE, Session, Step};
use exports::vhost_user::wire::{
    HEADER_LEN, Header, InflightDescription, LogDescription, MAX_CONFIG, MAX_PAYLOAD, Message,
    Reply, Request, parse,
};
use guest_memory::test_util::memfd_region;
use guest_memory::{DirtyLog, GuestMemory, Region};

use crate::input::Input;

const NUM_QUEUES: u16 = 3;
/// Bytes of the memory file that the front end has.
const FILE_SIZE: u64 = 0x10000;

/// A device that does nothing.
struct Nothing;

impl Device for Nothing {
    fn features(&self) -> u64 {
        0x7240
    }

    fn set_features(&self, negotiated: u64) {
        assert_eq!(negotiated & (1 << 30), 0, "that one is vhost-user's");
    }

    fn reset(&self) {}

    fn num_queues(&self) -> u16 {
        NUM_QUEUES
    }

    fn config_space(&self) -> Vec<u8> {
        vec![7; 60]
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<Option<String>, String> {
        match (offset, data.len()) {
            (32, 1) => Ok(None),
            (31, _) => Ok(Some("ignored".into())),
            _ => Err("read-only".into()),
        }
    }

    fn watch(&self, _: &Watcher) {}

    fn refresh(&self) -> bool {
        false
    }

    fn attach(self: Arc<Self>, _: &EventLoop) -> io::Result<Rc<dyn DeviceOnLoop>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Descriptors that a front end can send, duplicated for each message.
struct Files {
    event: OwnedFd,
    memory: OwnedFd,
    null: OwnedFd,
}

impl Files {
    fn new() -> Self {
        let null = std::fs::File::open("/dev/null").expect("a device");
        Files {
            event: nix::sys::eventfd::EventFd::new().expect("an eventfd").into(),
            memory: memfd_region(0, FILE_SIZE).expect("a memfd").fd,
            null: null.into(),
        }
    }

    fn take(&self, input: &mut Input<'_>, count: u8) -> Vec<OwnedFd> {
        let one = |_| match input.u8() % 3 {
            0 => self.event.try_clone(),
            1 => self.memory.try_clone(),
            _ => self.null.try_clone(),
        };
        (0..count).map(one).map(|fd| fd.expect("a descriptor")).collect()
    }
}

thread_local! {
    static FILES: Files = Files::new();
}

/// Runs the messages in `data`.
pub fn run(data: &[u8]) {
    FILES.with(|files| {
        let mut input = Input::new(data);
        let mut front_end = FrontEnd {
            session: Session::new(Arc::new(Nothing)),
            memory: GuestMemory::new(),
            running: BTreeSet::new(),
        };
        // Bounded, as libFuzzer's own limit on the length of inputs may be lifted.
        for _ in 0..1024 {
            if input.is_empty() {
                break;
            }
            let bytes = message(&mut input);
            let count = input.u8() & 3;
            let fds = files.take(&mut input, count);
            if let Ok((header, message)) = parse(&bytes, fds) {
                front_end.send(header, message);
            }
        }
    });
}

/// A message: most often of a known request, its payload of the right length.
fn message(input: &mut Input<'_>) -> Vec<u8> {
    let (choice, code) = (input.u8(), input.u8());
    let mut len = match choice & 7 {
        0 => usize::from(input.u16()) % (MAX_PAYLOAD + 2),
        1 => usize::from(input.u8()),
        _ => match Request::from_code(code.into()) {
            Some(Request::SetMemTable) => 8 + 32 * usize::from(input.u8() & 3),
            Some(Request::GetConfig | Request::SetConfig) => 12 + usize::from(input.u8()),
            Some(Request::SetLogBase) => 16,
            Some(Request::GetInflightFd | Request::SetInflightFd) => 24,
            Some(Request::SetVringAddr | Request::AddMemReg | Request::RemMemReg) => 40,
            Some(request) if request.has_reply() && request != Request::GetVringBase => 0,
            Some(
                Request::SetOwner | Request::ResetOwner | Request::SetLogFd | Request::ResetDevice,
            ) => 0,
            _ => 8,
        },
    };
    let flags = if choice & 8 == 0 { 9 } else { input.u32() };
    let mut bytes = Vec::with_capacity(HEADER_LEN + len);
    bytes.extend(u32::from(code).to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend((len as u32).to_ne_bytes());
    if choice & 16 != 0 {
        // Cut short, or with something after it.
        len = usize::from(input.u8());
    }
    for _ in 0..len.div_ceil(8) {
        // Small numbers more often than others.
        let word = match input.u8() {
            255 => input.u64(),
            254 => u64::from(input.u32()) << 12,
            253 => u64::from(input.u32()) | u64::from(input.u8()) << 32,
            small => small.into(),
        };
        bytes.extend(word.to_ne_bytes());
    }
    bytes.truncate(HEADER_LEN + len);
    bytes
}

/// The session, and what its front end knows of it.
struct FrontEnd {
    session: Session,
    memory: GuestMemory,
    running: BTreeSet<u16>,
}

impl FrontEnd {
    fn send(&mut self, header: Header, message: Message) {
        let request = Request::from_code(header.code).expect("only these are parsed");
        let about = format!("{message:?}");
        let reply = match self.session.handle(message) {
            Err(error) => {
                assert!(!error.to_string().is_empty());
                return;
            }
            Ok(Step::Done) => None,
            Ok(Step::Reply(reply)) => Some(reply),
            Ok(Step::Do(action)) => self.act(action),
        };
        assert_eq!(reply.is_some(), request.has_reply(), "{about}");
        if let Some(reply) = reply {
            check_reply(&reply, header.code);
        }
    }

    fn act(&mut self, action: Action) -> Option<Reply> {
        match action {
            Action::SetMemory(regions) => {
                let mapped: Result<Vec<_>, _> =
                    regions.into_iter().map(|region| region.map().map(Arc::new)).collect();
                if let Ok(memory) = mapped.and_then(GuestMemory::from_regions) {
                    self.memory = memory;
                }
            }
            Action::AddRegion(region) => self.add(region),
            Action::RemoveRegion(id) => {
                let without = self.memory.without_region(id.guest_addr, id.user_addr, id.size);
                if let Ok(memory) = without {
                    self.memory = memory;
                }
            }
            Action::StartRing { index, setup } => {
                assert!(index < NUM_QUEUES);
                let config = setup.config;
                assert!(config.size.is_power_of_two() && config.size <= MAX_QUEUE_SIZE);
                assert!(config.desc % 8 == 0 && config.avail % 2 == 0 && config.used % 4 == 0);
                self.session.ring_started(index);
                self.running.insert(index);
            }
            Action::StopRing { index } => {
                assert!(self.running.remove(&index));
                return Some(self.session.ring_stopped(index, Some(index)));
            }
            Action::SetCall { index, .. } | Action::SetErr { index, .. } => {
                assert!(index < NUM_QUEUES);
            }
            Action::SetEnabled { index, .. } => assert!(self.running.contains(&index)),
            Action::Note(_) | Action::TellChanges(_) | Action::SetLogFd(_) => {}
            Action::SetLogBase { description, fd } => {
                let LogDescription { mmap_size, mmap_offset } = description;
                if let Ok(log) = DirtyLog::map(fd, mmap_offset, mmap_size) {
                    assert!(mmap_size <= FILE_SIZE, "there is no more");
                    // Anywhere, also beyond the log's end.
                    log.mark(mmap_offset << 12, mmap_size << 9);
                    log.mark(log.end() - 1, u64::MAX);
                }
                return Some(Reply::Log(description));
            }
            Action::SetLogging(on) => self.session.logging_set(on),
            Action::SetUsedLog { index, .. } => assert!(self.running.contains(&index)),
            Action::CreateInflight { num_queues, queue_size, payload_len } => {
                assert!(num_queues <= NUM_QUEUES && queue_size <= MAX_QUEUE_SIZE);
                let (mmap_size, mmap_offset) = (1 << 16, 0);
                let description =
                    InflightDescription { mmap_size, mmap_offset, num_queues, queue_size };
                return Some(Reply::Inflight { description, payload_len });
            }
            Action::SetInflight { description, .. } => {
                assert!(self.running.is_empty() && description.queue_size <= MAX_QUEUE_SIZE);
                self.session.inflight_set(None);
            }
            Action::ResetRings(_) => {
                let bases: Vec<_> = self.running.iter().map(|&index| (index, index)).collect();
                self.session.rings_reset(&bases);
                self.running.clear();
            }
        }
        None
    }

    fn add(&mut self, region: Region) {
        let Ok(mapped) = region.map() else { return };
        assert!(mapped.size() <= FILE_SIZE, "there is no more");
        if let Ok(memory) = self.memory.with_region(Arc::new(mapped)) {
            self.memory = memory;
        }
        // Each mapping costs; what is checked shows with few.
        if self.memory.regions().len() > 16 {
            self.memory = GuestMemory::new();
        }
    }
}

fn check_reply(reply: &Reply, code: u32) {
    let bytes = reply.encode(code);
    let field = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
    assert_eq!((field(0), field(4)), (code, 5));
    assert_eq!(field(8) as usize, bytes.len() - HEADER_LEN);
    assert!(bytes.len() <= HEADER_LEN + 12 + MAX_CONFIG);
}
