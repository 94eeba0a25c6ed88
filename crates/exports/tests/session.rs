//! The session as a state machine: what is agreed on, in which order, and what is refused.
#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use block::node::Watcher;
use devices::virtio::CacheRecord;
use event_loop::EventLoop;
use exports::vhost_user::device::{Device, DeviceOnLoop};
use exports::vhost_user::session::{
    Action, MAX_MEM_SLOTS, MAX_QUEUE_SIZE, Reset, RingSetup, Session, Step, VHOST_F_LOG_ALL,
    VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_RING_EVENT_IDX, VIRTIO_F_RING_INDIRECT_DESC,
    VIRTIO_F_VERSION_1, protocol_features,
};
use exports::vhost_user::wire::{ConfigWrite, LogDescription, Message, Reply, VringAddr};
use exports::vhost_user::{NotEventfd, SessionError};
use nix::sys::epoll::{Epoll, EpollCreateFlags};
use nix::sys::eventfd::EventFd;
use nix::sys::signal::SigSet;
use nix::sys::signalfd::SignalFd;
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};

const FEATURES: u64 = 1 << 9 | 1 << 6;
const ADDR: VringAddr = VringAddr { desc: 0x1000, avail: 0x2000, used: 0x3000, log: None };

/// A device that writes down what is asked of it.
#[derive(Default)]
struct Paper {
    notes: Mutex<Vec<String>>,
    lacks_config: bool,
}

impl Paper {
    fn note(&self, line: impl Into<String>) {
        event_loop::sync::lock(&self.notes).push(line.into());
    }

    fn taken(&self) -> Vec<String> {
        std::mem::take(&mut *event_loop::sync::lock(&self.notes))
    }
}

impl Device for Paper {
    fn features(&self) -> u64 {
        FEATURES
    }

    fn set_features(&self, negotiated: u64) {
        self.note(format!("features {negotiated:#x}"));
    }

    fn reset(&self) {
        self.note("reset");
    }

    fn num_queues(&self) -> u16 {
        2
    }

    fn has_config(&self) -> bool {
        !self.lacks_config
    }

    fn config_space(&self) -> Vec<u8> {
        vec![1, 2, 3, 4]
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<Option<String>, String> {
        self.note(format!("write {data:?} at {offset}"));
        if offset == 0 { Ok(None) } else { Err("read-only".into()) }
    }

    fn keep_write_cache(&self, record: Option<CacheRecord>) -> bool {
        record.is_some()
    }

    fn watch(&self, _: &Watcher) {}

    fn refresh(&self) -> bool {
        unreachable!("nothing changes")
    }

    fn attach(self: Arc<Self>, _: &EventLoop) -> io::Result<Rc<dyn DeviceOnLoop>> {
        unreachable!("a session starts nothing")
    }
}

fn session() -> (Session, Arc<Paper>) {
    let device = Arc::new(Paper::default());
    let session = Session::new(device.clone());
    assert_eq!(device.taken(), ["features 0x0"]);
    (session, device)
}

fn eventfd() -> OwnedFd {
    EventFd::new().unwrap().into()
}

#[track_caller]
fn done(session: &mut Session, message: Message) {
    let step = session.handle(message);
    assert!(matches!(step, Ok(Step::Done)), "{step:?}");
}

#[track_caller]
fn replied(session: &mut Session, message: Message) -> Reply {
    match session.handle(message) {
        Ok(Step::Reply(reply)) => reply,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn refused(session: &mut Session, message: Message) -> SessionError {
    session.handle(message).unwrap_err()
}

#[track_caller]
fn kicked(session: &mut Session, index: u32) -> RingSetup {
    match session.handle(Message::SetVringKick { index, fd: Some(eventfd()) }) {
        Ok(Step::Do(Action::StartRing { index: i, setup })) if u32::from(i) == index => setup,
        other => panic!("{other:?}"),
    }
}

fn copy_of(fd: impl AsFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().unwrap()
}

fn describe(session: &mut Session, index: u32) {
    done(session, Message::SetVringNum { index, num: 64 });
    done(session, Message::SetVringAddr { index, addr: ADDR });
}

#[test]
fn features_are_the_device_s_and_the_server_s() {
    let (mut session, device) = session();
    let offered = FEATURES
        | VIRTIO_F_VERSION_1
        | VIRTIO_F_RING_EVENT_IDX
        | VIRTIO_F_RING_INDIRECT_DESC
        | VHOST_USER_F_PROTOCOL_FEATURES;
    let with_log = Reply::U64(offered | VHOST_F_LOG_ALL);
    assert_eq!(replied(&mut session, Message::GetFeatures), with_log);
    done(&mut session, Message::SetFeatures(offered));
    // The device does not get vhost-user's own feature bits.
    let negotiated = offered & !VHOST_USER_F_PROTOCOL_FEATURES;
    assert_eq!(device.taken(), [format!("features {negotiated:#x}")]);
    let error = refused(&mut session, Message::SetFeatures(offered | 1 << 27));
    assert_eq!(error, SessionError::Features(1 << 27));
    assert_eq!(device.taken(), [""; 0]);
    let all = protocol_features::OFFERED;
    assert_eq!(replied(&mut session, Message::GetProtocolFeatures), Reply::U64(all));
    assert!(!session.has_reply_ack());
    done(&mut session, Message::SetProtocolFeatures(all));
    assert!(session.has_reply_ack());
    let error = refused(&mut session, Message::SetProtocolFeatures(all | 1 << 14));
    assert_eq!(error, SessionError::ProtocolFeatures(1 << 14));
    assert!(session.has_reply_ack());
}

/// QEMU warns of CONFIG where QEMU keeps the configuration space, and of a BACKEND_REQ socket that
/// closes.
#[test]
fn nothing_of_the_configuration_space_is_offered_by_a_device_without_one() {
    let mut session = Session::new(Arc::new(Paper { lacks_config: true, ..Paper::default() }));
    let (config, backend_req) = (protocol_features::CONFIG, protocol_features::BACKEND_REQ);
    let offered = protocol_features::OFFERED & !config & !backend_req;
    assert_eq!(replied(&mut session, Message::GetProtocolFeatures), Reply::U64(offered));
    // A session that is taken over from an older version has these features.
    done(&mut session, Message::SetProtocolFeatures(protocol_features::OFFERED));
}

#[test]
fn front_ends_that_read_the_configuration_space_learn_of_changes() {
    let (mut session, _) = session();
    let socket = || Message::SetBackendReqFd(UnixStream::pair().unwrap().0.into());
    done(&mut session, Message::SetProtocolFeatures(protocol_features::BACKEND_REQ));
    done(&mut session, socket());
    let wanted = protocol_features::BACKEND_REQ | protocol_features::CONFIG;
    done(&mut session, Message::SetProtocolFeatures(wanted));
    let step = session.handle(socket());
    assert!(matches!(step, Ok(Step::Do(Action::TellChanges(_)))), "{step:?}");
}

#[test]
fn numbers_that_front_ends_ask_for() {
    let (mut session, _) = session();
    assert_eq!(replied(&mut session, Message::GetQueueNum), Reply::U64(2));
    let slots = MAX_MEM_SLOTS as u64;
    assert_eq!(replied(&mut session, Message::GetMaxMemSlots), Reply::U64(slots));
    done(&mut session, Message::SetStatus(7));
    assert_eq!(replied(&mut session, Message::GetStatus), Reply::U64(7));
    done(&mut session, Message::SetOwner);
    done(&mut session, Message::ResetOwner);
}

#[test]
fn a_ring_starts_with_its_kick_when_all_is_known() {
    let (mut session, _) = session();
    let features = VIRTIO_F_RING_EVENT_IDX | VHOST_USER_F_PROTOCOL_FEATURES;
    done(&mut session, Message::SetFeatures(features));
    let kick = || Message::SetVringKick { index: 1, fd: Some(eventfd()) };
    let missing = |missing| SessionError::Incomplete { index: 1, missing };
    assert_eq!(refused(&mut session, kick()), missing("SET_VRING_NUM"));
    done(&mut session, Message::SetVringNum { index: 1, num: 64 });
    assert_eq!(refused(&mut session, kick()), missing("SET_VRING_ADDR"));
    done(&mut session, Message::SetVringAddr { index: 1, addr: ADDR });
    done(&mut session, Message::SetVringBase { index: 1, base: 65535 });
    let setup = kicked(&mut session, 1);
    assert_eq!(setup.config.size, 64);
    let config = setup.config;
    assert_eq!((config.desc, config.avail, config.used), (0x1000, 0x2000, 0x3000));
    assert_eq!((config.event_idx, config.indirect), (true, false));
    assert_eq!(config.next_avail, 65535);
    assert!(setup.kick.is_some() && setup.call.is_none() && setup.err.is_none());
    // The addresses of one ring do not apply to another.
    let kick = Message::SetVringKick { index: 0, fd: None };
    assert!(matches!(refused(&mut session, kick), SessionError::Incomplete { index: 0, .. }));
}

#[test]
fn without_a_descriptor_a_ring_is_polled() {
    let (mut session, _) = session();
    describe(&mut session, 0);
    match session.handle(Message::SetVringKick { index: 0, fd: None }) {
        Ok(Step::Do(Action::StartRing { setup, .. })) => assert!(setup.kick.is_none()),
        other => panic!("{other:?}"),
    }
    let step = session.handle(Message::SetVringCall { index: 0, fd: None });
    assert!(matches!(step, Ok(Step::Do(Action::SetCall { index: 0, call: None }))), "{step:?}");
    let step = session.handle(Message::SetVringErr { index: 0, fd: None });
    assert!(matches!(step, Ok(Step::Do(Action::SetErr { index: 0, err: None }))), "{step:?}");
}

#[test]
fn call_and_err_given_before_the_start_are_there_at_the_start() {
    let (mut session, _) = session();
    describe(&mut session, 0);
    let step = session.handle(Message::SetVringCall { index: 0, fd: Some(eventfd()) });
    assert!(matches!(step, Ok(Step::Do(Action::SetCall { index: 0, call: Some(_) }))), "{step:?}");
    let step = session.handle(Message::SetVringErr { index: 0, fd: Some(eventfd()) });
    assert!(matches!(step, Ok(Step::Do(Action::SetErr { index: 0, err: Some(_) }))), "{step:?}");
    let setup = kicked(&mut session, 0);
    assert!(setup.call.is_some() && setup.err.is_some());
}

#[test]
fn rings_are_enabled_at_once_only_without_protocol_features() {
    for (features, enable, enabled) in [
        (None, None, true),
        (Some(0), None, true),
        (Some(0), Some(false), false),
        (Some(VHOST_USER_F_PROTOCOL_FEATURES), None, false),
        (Some(VHOST_USER_F_PROTOCOL_FEATURES), Some(false), false),
        (Some(VHOST_USER_F_PROTOCOL_FEATURES), Some(true), true),
    ] {
        let (mut session, _) = session();
        if let Some(features) = features {
            done(&mut session, Message::SetFeatures(features));
        }
        describe(&mut session, 0);
        if let Some(enable) = enable {
            done(&mut session, Message::SetVringEnable { index: 0, enable });
        }
        let got = kicked(&mut session, 0).enabled;
        assert_eq!(got, enabled, "{features:?} {enable:?}");
    }
}

#[test]
fn a_ring_that_runs_can_be_disabled_stopped_and_not_changed() {
    let (mut session, _) = session();
    describe(&mut session, 0);
    kicked(&mut session, 0);
    // Not before it is known to run.
    let index = 0;
    assert_eq!(
        replied(&mut session, Message::GetVringBase { index }),
        Reply::VringState { index, num: 0 }
    );
    session.ring_started(0);
    let step = session.handle(Message::SetVringEnable { index, enable: false });
    let disabled = Step::Do(Action::SetEnabled { index: 0, enabled: false });
    assert_eq!(format!("{step:?}"), format!("{:?}", Ok::<_, SessionError>(disabled)));
    let running = SessionError::Running { index: 0 };
    let other = VringAddr { desc: 0x8000, ..ADDR };
    for message in [
        Message::SetVringBase { index, base: 0 },
        Message::SetVringNum { index, num: 128 },
        Message::SetVringAddr { index, addr: other },
        Message::SetFeatures(VIRTIO_F_VERSION_1),
    ] {
        assert_eq!(refused(&mut session, message), running);
    }
    // The same again changes nothing, and the other ring does not run.
    describe(&mut session, 0);
    done(&mut session, Message::SetFeatures(0));
    done(&mut session, Message::SetVringBase { index: 1, base: 3 });
    let step = session.handle(Message::GetVringBase { index });
    assert!(matches!(step, Ok(Step::Do(Action::StopRing { index: 0 }))), "{step:?}");
    assert_eq!(session.ring_stopped(0, Some(42)), Reply::VringState { index, num: 42 });
    // The ring continues at that index, and gets its eventfds later.
    let setup = kicked(&mut session, 0);
    assert_eq!(setup.config.next_avail, 42);
    assert!(setup.call.is_none());
}

#[test]
fn a_stopped_ring_remembers_its_reported_base() {
    let (mut session, _) = session();
    let index = 0;
    let began_at = |session: &mut Session, base| {
        describe(session, 0);
        done(session, Message::SetVringBase { index, base });
        kicked(session, 0).was_stopped
    };
    assert!(!began_at(&mut session, 42), "so it says");
    session.ring_started(0);
    session.ring_stopped(0, Some(42));
    assert!(!began_at(&mut session, 43), "it has its reasons");
    assert!(began_at(&mut session, 42));
    session.rings_reset(&[]);
    assert!(
        began_at(&mut session, 42),
        "QEMU sets status 0 after it has stopped the ring of a paused guest"
    );
    assert!(!began_at(&mut session, 0), "other rings");
}

/// The order of QEMU before 8.0, which stops its guest.
#[test]
fn a_reset_ring_remembers_its_base_until_it_starts_again() {
    let (mut session, _) = session();
    let base_of =
        |session: &mut Session, index| match replied(session, Message::GetVringBase { index }) {
            Reply::VringState { index: i, num } if i == index => num,
            other => panic!("{other:?}"),
        };
    for index in 0..2 {
        describe(&mut session, index);
        kicked(&mut session, index);
        session.ring_started(index as u16);
    }
    session.ring_stopped(1, Some(41));
    session.rings_reset(&[(0, 42)]);
    // Disabled after the reset, and a second reset.
    done(&mut session, Message::SetVringEnable { index: 0, enable: false });
    session.rings_reset(&[]);
    // Without a word of the front end it begins anew: the driver was reset.
    describe(&mut session, 0);
    let setup = kicked(&mut session, 0);
    assert_eq!((setup.config.next_avail, setup.was_stopped, setup.is_new), (0, false, true));
    assert_eq!([0, 1].map(|index| base_of(&mut session, index)), [42, 41]);
    for (base, was_stopped, is_new) in [(42, true, false), (0, false, true)] {
        describe(&mut session, 0);
        done(&mut session, Message::SetVringBase { index: 0, base });
        let setup = kicked(&mut session, 0);
        assert_eq!((setup.config.next_avail, setup.was_stopped), (base, was_stopped));
        assert_eq!(setup.is_new, is_new, "recorded requests of the guest before");
        assert_eq!(base_of(&mut session, 0), u32::from(base), "the front end's word");
    }
    session.ring_started(0);
    session.ring_stopped(0, Some(7));
    assert_eq!(base_of(&mut session, 0), 7);
    done(&mut session, Message::SetVringBase { index: 0, base: 3 });
    assert!(!kicked(&mut session, 0).is_new, "no reset since");
}

/// A front end that sets status 0 first may hand over the record of a guest that runs.
#[test]
fn a_reset_before_the_first_start_makes_no_record_obsolete() {
    let (mut session, _) = session();
    session.rings_reset(&[]);
    describe(&mut session, 0);
    done(&mut session, Message::SetVringBase { index: 0, base: 42 });
    let setup = kicked(&mut session, 0);
    assert_eq!((setup.was_stopped, setup.is_new), (false, false));
}

#[test]
fn logging_is_switched_while_rings_run() {
    let (mut session, device) = session();
    describe(&mut session, 0);
    kicked(&mut session, 0);
    session.ring_started(0);
    let _ = device.taken();
    let log = |session: &mut Session, features| match session.handle(Message::SetFeatures(features))
    {
        Ok(Step::Do(Action::SetLogging(on))) => on,
        other => panic!("{other:?}"),
    };
    assert!(log(&mut session, VHOST_F_LOG_ALL));
    // It could not be done, so it is asked for again.
    assert!(log(&mut session, VHOST_F_LOG_ALL));
    session.logging_set(true);
    done(&mut session, Message::SetFeatures(VHOST_F_LOG_ALL));
    assert!(device.taken().iter().all(|taken| taken == "features 0x0"), "not the device's");
    let addr = VringAddr { log: Some(0x3000), ..ADDR };
    let step = session.handle(Message::SetVringAddr { index: 0, addr });
    let there = Some(0x3000);
    assert!(
        matches!(&step, Ok(Step::Do(Action::SetUsedLog { index: 0, addr })) if *addr == there),
        "{step:?}"
    );
    done(&mut session, Message::SetVringAddr { index: 0, addr });
    let features = VHOST_F_LOG_ALL | VIRTIO_F_VERSION_1;
    let error = refused(&mut session, Message::SetFeatures(features));
    assert_eq!(error, SessionError::Running { index: 0 });
    assert!(!log(&mut session, 0));
    session.logging_set(false);
    let description = LogDescription { mmap_size: 0x1000, mmap_offset: 0 };
    let base =
        |session: &mut Session| session.handle(Message::SetLogBase { description, fd: eventfd() });
    assert_eq!(base(&mut session).unwrap_err(), SessionError::Log);
    done(&mut session, Message::SetProtocolFeatures(protocol_features::LOG_SHMFD));
    let step = base(&mut session);
    assert!(matches!(step, Ok(Step::Do(Action::SetLogBase { .. }))), "{step:?}");
}

#[test]
fn indexes_out_of_range_are_refused_by_all_that_have_one() {
    let (mut session, _) = session();
    for index in [2, 255, 65536, u32::MAX] {
        let fd = || Some(eventfd());
        for message in [
            Message::SetVringNum { index, num: 64 },
            Message::SetVringAddr { index, addr: ADDR },
            Message::SetVringBase { index, base: 0 },
            Message::GetVringBase { index },
            Message::SetVringKick { index, fd: fd() },
            Message::SetVringCall { index, fd: fd() },
            Message::SetVringErr { index, fd: fd() },
            Message::SetVringEnable { index, enable: true },
        ] {
            let error = refused(&mut session, message);
            assert_eq!(error, SessionError::QueueIndex { index, num_queues: 2 });
        }
    }
}

#[test]
fn queues_have_a_largest_size() {
    let (mut session, _) = session();
    done(&mut session, Message::SetVringNum { index: 0, num: MAX_QUEUE_SIZE });
    let num = MAX_QUEUE_SIZE * 2;
    let error = refused(&mut session, Message::SetVringNum { index: 0, num });
    assert_eq!(error, SessionError::QueueSize(num));
}

#[test]
fn only_eventfds_are_taken_for_eventfds() {
    let (mut session, _) = session();
    describe(&mut session, 0);
    let pipe = || nix::unistd::pipe().unwrap().1;
    let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let dir = || OwnedFd::from(std::fs::File::open("/").unwrap());
    let socket = || OwnedFd::from(std::os::unix::net::UnixStream::pair().unwrap().0);
    // Other anonymous inodes are refused as well. Using an epoll descriptor may call into all files
    // of its set.
    let epoll = || Epoll::new(EpollCreateFlags::empty()).unwrap().0;
    let timer = || copy_of(TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::empty()).unwrap());
    let signal = || copy_of(SignalFd::new(&SigSet::empty()).unwrap());
    for fd in [pipe, file, dir, socket, epoll, timer, signal] {
        for message in [
            Message::SetVringKick { index: 0, fd: Some(fd()) },
            Message::SetVringCall { index: 0, fd: Some(fd()) },
            Message::SetVringErr { index: 0, fd: Some(fd()) },
        ] {
            assert_eq!(refused(&mut session, message), SessionError::NotEventfd(NotEventfd));
        }
    }
    let setup = kicked(&mut session, 0);
    assert!(setup.call.is_none() && setup.err.is_none());
}

#[test]
fn only_unix_stream_sockets_are_ways_back() {
    let (mut session, _) = session();
    let tcp = std::net::TcpListener::bind("localhost:0").unwrap();
    let datagrams = std::os::unix::net::UnixDatagram::unbound().unwrap();
    for fd in [copy_of(tcp), copy_of(datagrams), eventfd()] {
        assert_eq!(refused(&mut session, Message::SetBackendReqFd(fd)), SessionError::NotSocket);
    }
    done(&mut session, Message::SetBackendReqFd(UnixStream::pair().unwrap().0.into()));
}

#[test]
fn reads_beyond_the_configuration_space_are_zero_and_writes_are_checked() {
    let (mut session, device) = session();
    let mut read =
        |offset, size| match replied(&mut session, Message::GetConfig { offset, size, flags: 5 }) {
            Reply::Config { offset: o, flags: 5, data } if o == offset => data,
            other => panic!("{other:?}"),
        };
    assert_eq!(read(0, 4), [1, 2, 3, 4]);
    assert_eq!(read(2, 4), [3, 4, 0, 0]);
    assert_eq!(read(u32::MAX, 2), [0, 0]);
    assert_eq!(read(0, 0), [0; 0]);
    device.taken();
    let write = |offset| Message::SetConfig { offset, data: vec![9], writer: ConfigWrite::Driver };
    done(&mut session, write(0));
    let error = refused(&mut session, write(1));
    assert_eq!(error, SessionError::Config("read-only".into()));
    assert_eq!(device.taken(), ["write [9] at 0", "write [9] at 1"]);
}

#[test]
fn a_look_at_config_space_before_the_start_resets_the_device_once() {
    let look = || Message::GetConfig { offset: 0, size: 1, flags: 0 };
    let (mut session, device) = session();
    done(&mut session, Message::SetFeatures(FEATURES));
    device.taken();
    replied(&mut session, look());
    let features = format!("features {FEATURES:#x}");
    assert_eq!(device.taken(), ["reset", features.as_str()]);
    replied(&mut session, look());
    assert_eq!(device.taken(), [""; 0]);

    // The device is not reset once a guest has run, even if its rings are stopped, or if an inflight record
    // shows that the guest has run before.
    let begun: [fn(&mut Session); 3] = [
        |session| session.ring_started(0),
        |session| {
            session.ring_started(0);
            session.ring_stopped(0, Some(7));
        },
        |session| session.inflight_set(used_record()),
    ];
    for begin in begun {
        let device = Arc::new(Paper::default());
        let mut session = Session::new(device.clone());
        describe(&mut session, 0);
        begin(&mut session);
        device.taken();
        replied(&mut session, look());
        assert_eq!(device.taken(), [""; 0]);
    }
    // One that says nothing is that of a guest that is about to begin.
    let device = Arc::new(Paper::default());
    let mut session = Session::new(device.clone());
    session.inflight_set(None);
    device.taken();
    replied(&mut session, look());
    assert_eq!(device.taken(), ["reset", "features 0x0"]);
}

/// Of which [`Paper`] says that it was used before.
fn used_record() -> Option<CacheRecord> {
    let region = guest_memory::test_util::memfd_region(0, CacheRecord::LEN).unwrap();
    CacheRecord::new(Arc::new(region.map().unwrap()), 0)
}

#[test]
fn a_reset_forgets_rings_features_and_status_but_not_protocol_features() {
    let resets: [(fn() -> Message, Reset); 2] =
        [(|| Message::ResetDevice, Reset::Device), (|| Message::SetStatus(0), Reset::Status)];
    for (reset, which) in resets {
        let (mut session, device) = session();
        done(&mut session, Message::SetProtocolFeatures(protocol_features::REPLY_ACK));
        done(&mut session, Message::SetFeatures(FEATURES));
        done(&mut session, Message::SetStatus(15));
        describe(&mut session, 0);
        kicked(&mut session, 0);
        session.ring_started(0);
        device.taken();
        let step = session.handle(reset());
        assert!(matches!(&step, Ok(Step::Do(Action::ResetRings(r))) if *r == which), "{step:?}");
        session.rings_reset(&[(0, 5)]);
        assert_eq!(device.taken(), ["features 0x0"]);
        assert_eq!(replied(&mut session, Message::GetStatus), Reply::U64(0));
        assert!(session.has_reply_ack());
        let kick = Message::SetVringKick { index: 0, fd: Some(eventfd()) };
        assert!(matches!(refused(&mut session, kick), SessionError::Incomplete { .. }));
        done(&mut session, Message::SetFeatures(FEATURES));
    }
}
