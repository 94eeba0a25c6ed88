//! The server in front of peers that are slow, silent, wrong or gone; and its sockets.

use crate::common;

use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use block::node::{BlockNode, Channel, Geometry};
use common::{
    Daemon, Dir, Guest, NEED_REPLY, Options, SECTOR, ask, connect, eventually, io_thread, message,
    number, raw_message, receive, run_on, send_with, with_reply_ack,
};
use event_loop::{EventLoop, RingChoice};
use exports::vhost_user::wire::{MAX_FDS, MAX_PAYLOAD, Request};
use exports::vhost_user::{ExportError, Listen, VhostUserExport};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr};

/// A front end is served as if nothing had happened.
#[track_caller]
fn serves(daemon: &Daemon) {
    let mut stream = daemon.connect();
    assert_ne!(ask(&mut stream, Request::GetFeatures, 0, &[]), 0);
}

/// Another export of the same daemon.
fn neighbour(daemon: &Daemon) -> (VhostUserExport, Dir) {
    let dir = Dir::new();
    let export = daemon.start(daemon.config(Listen::Path(dir.socket()), 1)).unwrap();
    (export, dir)
}

fn region(size: u64) -> Vec<u8> {
    [0, 0, size, 0x7000_0000_0000, 0].into_iter().flat_map(u64::to_ne_bytes).collect()
}

#[test]
fn half_messages_are_waited_for() {
    let daemon = Daemon::new();
    let (_neighbour, dir) = neighbour(&daemon);
    let mut slow = daemon.connect();
    let bytes = message(Request::SetProtocolFeatures, NEED_REPLY, &8u64.to_ne_bytes());
    for byte in bytes {
        slow.write_all(&[byte]).unwrap();
        // Other connections continue.
        assert_ne!(ask(&mut connect(&dir.socket()), Request::GetFeatures, 0, &[]), 0);
    }
    assert_eq!(number(&mut slow, Request::SetProtocolFeatures as u32), 0);
}

#[test]
fn messages_in_one_piece_are_taken_apart() {
    let daemon = Daemon::new();
    let mut stream = daemon.connect();
    let call = nix::sys::eventfd::EventFd::new().unwrap();
    let both = [
        message(Request::GetQueueNum, 0, &[]),
        message(Request::SetVringCall, 0, &0u64.to_ne_bytes()),
        message(Request::GetMaxMemSlots, 0, &[]),
    ];
    // The descriptor belongs to the second message, which arrives in a separate piece.
    send_with(&stream, &both[0], &[]);
    send_with(&stream, &[both[1].as_slice(), &both[2]].concat(), &[call.as_raw_fd()]);
    assert_eq!(number(&mut stream, Request::GetQueueNum as u32), 1);
    assert_eq!(number(&mut stream, Request::GetMaxMemSlots as u32), 509);
    assert_eq!(call.read(), Ok(1));
}

#[test]
fn peers_that_leave_anywhere_in_a_message_are_survived() {
    let daemon = Daemon::new();
    let bytes = message(Request::SetFeatures, 0, &[0; 8]);
    for len in 0..bytes.len() {
        let mut stream = daemon.connect();
        stream.write_all(&bytes[..len]).unwrap();
        drop(stream);
        serves(&daemon);
    }
}

#[test]
fn a_peer_that_reads_nothing_costs_only_itself() {
    let mut daemon = Daemon::new();
    let (_neighbour, dir) = neighbour(&daemon);
    let mut deaf = daemon.connect();
    deaf.set_nonblocking(true).unwrap();
    let bytes = message(Request::GetFeatures, 0, &[]);
    // Until both directions are full, and stay so.
    let mut other = connect(&dir.socket());
    let mut refused_in_a_row = 0;
    while refused_in_a_row < 100 {
        match deaf.write(&bytes) {
            Ok(_) => refused_in_a_row = 0,
            Err(_) => refused_in_a_row += 1,
        }
        assert_ne!(ask(&mut other, Request::GetFeatures, 0, &[]), 0);
    }
    daemon.stop().unwrap();
}

#[test]
fn further_front_ends_wait_for_their_turn() {
    let daemon = Daemon::new();
    let mut first = daemon.connect();
    assert_ne!(ask(&mut first, Request::GetFeatures, 0, &[]), 0);
    assert!(daemon.export().is_connected());
    let mut second = daemon.connect();
    send_with(&second, &message(Request::GetFeatures, 0, &[]), &[]);
    second.set_read_timeout(Some(common::NOT_YET)).unwrap();
    nix::sys::socket::recv(second.as_raw_fd(), &mut [0], nix::sys::socket::MsgFlags::empty())
        .unwrap_err();
    assert_ne!(ask(&mut first, Request::GetFeatures, 0, &[]), 0);
    drop(first);
    second.set_read_timeout(Some(common::PATIENCE)).unwrap();
    assert_ne!(number(&mut second, Request::GetFeatures as u32), 0);
    drop(second);
    eventually("nobody is connected", || !daemon.export().is_connected());
}

#[test]
fn unknown_requests_are_refused_by_reply_or_by_closing() {
    let daemon = Daemon::new();
    let mut stream = with_reply_ack(daemon.connect());
    for (code, len) in [(0, 0), (20, 8), (21, 0), (33, 24), (u32::MAX, MAX_PAYLOAD)] {
        send_with(&stream, &raw_message(code, NEED_REPLY, &vec![0; len]), &[]);
        assert_ne!(number(&mut stream, code), 0);
    }
    send_with(&stream, &raw_message(4711, 0, &[]), &[]);
    assert_eq!(receive(&mut stream), None);
    // Without REPLY_ACK there is no reply to ask for.
    let mut stream = daemon.connect();
    send_with(&stream, &raw_message(4711, NEED_REPLY, &[]), &[]);
    assert_eq!(receive(&mut stream), None);
    serves(&daemon);
}

#[test]
fn a_request_that_has_its_own_reply_is_never_answered_by_a_number() {
    let daemon = Daemon::new();
    let mut stream = with_reply_ack(daemon.connect());
    // Queue 7 does not exist, and no reply could say so.
    let payload = [7u32, 0].map(u32::to_ne_bytes).concat();
    send_with(&stream, &message(Request::GetVringBase, NEED_REPLY, &payload), &[]);
    assert_eq!(receive(&mut stream), None);
    serves(&daemon);
}

#[test]
fn bytes_that_are_no_messages_end_the_connection() {
    let daemon = Daemon::new();
    let too_long = (MAX_PAYLOAD as u32 + 1).to_ne_bytes();
    let mut long_header = message(Request::GetFeatures, 0, &[]);
    long_header[8..].copy_from_slice(&too_long);
    for bytes in [vec![0xff; 64], vec![0; 64], long_header] {
        let mut stream = daemon.connect();
        // It may be closed before all is written.
        let _ = stream.write_all(&bytes);
        assert_eq!(receive(&mut stream), None);
    }
    serves(&daemon);
}

#[test]
fn a_front_end_with_too_many_refused_requests_is_disconnected() {
    let daemon = Daemon::new();
    let mut stream = with_reply_ack(daemon.connect());
    let bytes = raw_message(4711, NEED_REPLY, &[]);
    // Their limit.
    for _ in 0..32 {
        send_with(&stream, &bytes, &[]);
        assert_ne!(number(&mut stream, 4711), 0);
    }
    send_with(&stream, &bytes, &[]);
    assert_eq!(receive(&mut stream), None);
    serves(&daemon);
}

#[test]
fn descriptors_of_every_kind_are_refused_where_they_do_not_fit() {
    let daemon = Daemon::new();
    let mut stream = with_reply_ack(daemon.connect());
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let dir = OwnedFd::from(std::fs::File::open("/").unwrap());
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let event: OwnedFd = nix::sys::eventfd::EventFd::new().unwrap().into();
    let small = Guest::new(0, 1);
    let (one, other) = UnixStream::pair().unwrap();
    for fd in [&reader, &writer, &dir, &null, &event, &one.into(), &other.into()] {
        for (request, payload) in [
            (Request::SetVringKick, 0u64.to_ne_bytes().to_vec()),
            (Request::AddMemReg, region(4096)),
        ] {
            send_with(&stream, &message(request, NEED_REPLY, &payload), &[fd.as_raw_fd()]);
            assert_ne!(number(&mut stream, request as u32), 0, "{request:?}");
        }
    }
    // Regions larger than their file, and without size.
    for size in [common::MEMORY + 1, u64::MAX, 0] {
        let bytes = message(Request::AddMemReg, NEED_REPLY, &region(size));
        send_with(&stream, &bytes, &[small.files[0].as_raw_fd()]);
        assert_ne!(number(&mut stream, Request::AddMemReg as u32), 0);
    }
    // As many as the kernel passes.
    let many = vec![event.as_raw_fd(); 253];
    for count in [MAX_FDS + 1, 253] {
        let bytes = message(Request::SetMemTable, NEED_REPLY, &[0; 8]);
        send_with(&stream, &bytes, &many[..count]);
        assert_ne!(number(&mut stream, Request::SetMemTable as u32), 0);
    }
    assert_ne!(ask(&mut stream, Request::GetFeatures, 0, &[]), 0);
}

#[test]
fn a_ring_without_kick_and_call_is_polled() {
    let daemon = Daemon::new();
    let mut stream = with_reply_ack(daemon.connect());
    let mut guest = Guest::new(1, 8);
    let memory = message(Request::AddMemReg, NEED_REPLY, &region(common::MEMORY));
    send_with(&stream, &memory, &[guest.files[0].as_raw_fd()]);
    assert_eq!(number(&mut stream, Request::AddMemReg as u32), 0);
    let config = guest.queues[0].driver.config();
    let num = [0, u32::from(config.size)].map(u32::to_ne_bytes).concat();
    assert_eq!(ask(&mut stream, Request::SetVringNum, NEED_REPLY, &num), 0);
    let addr: Vec<u8> = [0, config.desc, config.used, config.avail, 0]
        .into_iter()
        .flat_map(u64::to_ne_bytes)
        .collect();
    assert_eq!(ask(&mut stream, Request::SetVringAddr, NEED_REPLY, &addr), 0);
    let no_fd = 0x100u64.to_ne_bytes();
    assert_eq!(ask(&mut stream, Request::SetVringCall, NEED_REPLY, &no_fd), 0);
    // Requests that the ring has when it starts are taken without a kick.
    guest.offer(0, 1, 4, &[4; SECTOR]);
    assert_eq!(ask(&mut stream, Request::SetVringKick, NEED_REPLY, &no_fd), 0);
    let enable = [0, 1u32].map(u32::to_ne_bytes).concat();
    assert_eq!(ask(&mut stream, Request::SetVringEnable, NEED_REPLY, &enable), 0);
    eventually("the first request", || guest.reap(0) == Some(0));
    guest.offer(0, 1, 5, &[5; SECTOR]);
    eventually("the second request", || guest.reap(0) == Some(0));
    let base = message(Request::GetVringBase, 0, &[0; 8]);
    send_with(&stream, &base, &[]);
    let want = [0u32, 2].map(u32::to_ne_bytes).concat();
    assert_eq!(receive(&mut stream), Some((Request::GetVringBase as u32, want)));
}

#[test]
fn a_stale_socket_is_replaced_and_removed_at_the_end() {
    let mut daemon = Daemon::new();
    daemon.stop().unwrap();
    assert!(!daemon.socket().exists());
    let stale = UnixListener::bind(daemon.socket()).unwrap();
    drop(stale);
    let export = daemon.start(daemon.config(Listen::Path(daemon.socket()), 1)).unwrap();
    serves(&daemon);
    run_on(&daemon.control, |_| export.stop()).unwrap();
    assert!(!daemon.socket().exists());
}

#[test]
fn a_socket_in_use_and_a_file_are_left_alone() {
    let daemon = Daemon::new();
    let error = daemon.start(daemon.config(Listen::Path(daemon.socket()), 1)).err().unwrap();
    assert!(matches!(error, ExportError::SocketInUse { .. }), "{error}");
    serves(&daemon);
    let dir = Dir::new();
    std::fs::write(dir.socket(), "precious").unwrap();
    let error = daemon.start(daemon.config(Listen::Path(dir.socket()), 1)).err().unwrap();
    assert!(error.to_string().ends_with("exists and is not a socket"), "{error}");
    assert_eq!(std::fs::read(dir.socket()).unwrap(), b"precious");
    let missing = dir.socket().join("beneath");
    let error = daemon.start(daemon.config(Listen::Path(missing), 1)).err().unwrap();
    assert!(matches!(error, ExportError::Listen { call: "bind", .. }), "{error}");
    let long = PathBuf::from("/tmp/".to_owned() + &"x".repeat(120));
    let error = daemon.start(daemon.config(Listen::Path(long), 1)).err().unwrap();
    assert!(error.to_string().contains("too long"), "{error}");
}

#[test]
fn another_s_socket_in_the_place_of_ours_is_not_removed() {
    let mut daemon = Daemon::new();
    std::fs::remove_file(daemon.socket()).unwrap();
    let _other = UnixListener::bind(daemon.socket()).unwrap();
    daemon.stop().unwrap();
    assert!(daemon.socket().exists());
}

#[test]
fn an_inherited_listening_socket_is_served_and_its_file_kept() {
    let daemon = Daemon::new();
    let dir = Dir::new();
    let listener = UnixListener::bind(dir.socket()).unwrap();
    // Callers from before we came are served, too.
    let mut early = connect(&dir.socket());
    let export = daemon.start(daemon.config(Listen::Fd(Arc::new(listener.into())), 1)).unwrap();
    assert_ne!(ask(&mut early, Request::GetFeatures, 0, &[]), 0);
    drop(early);
    assert_ne!(ask(&mut connect(&dir.socket()), Request::GetFeatures, 0, &[]), 0);
    run_on(&daemon.control, |_| export.stop()).unwrap();
    assert!(dir.socket().exists());
}

#[test]
fn only_listening_unix_stream_sockets_are_accepted() {
    let daemon = Daemon::new();
    let dir = Dir::new();
    let unix = |kind| {
        let fd =
            nix::sys::socket::socket(AddressFamily::Unix, kind, SockFlag::empty(), None).unwrap();
        let address = UnixAddr::new(&dir.socket()).unwrap();
        nix::sys::socket::bind(fd.as_raw_fd(), &address).unwrap();
        std::fs::remove_file(dir.socket()).unwrap();
        fd
    };
    let packets = unix(SockType::SeqPacket);
    nix::sys::socket::listen(&packets, nix::sys::socket::Backlog::MAXCONN).unwrap();
    let silent = unix(SockType::Stream);
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    for fd in [packets, silent, tcp.into(), file.into()] {
        let error = daemon.start(daemon.config(Listen::Fd(Arc::new(fd)), 1)).err().unwrap();
        assert!(error.to_string().contains("file descriptor"), "{error}");
    }
}

#[test]
fn an_export_that_is_dropped_stops() {
    let daemon = Daemon::new();
    let (export, dir) = neighbour(&daemon);
    let mut stream = connect(&dir.socket());
    assert_ne!(ask(&mut stream, Request::GetFeatures, 0, &[]), 0);
    drop(export);
    assert_eq!(receive(&mut stream), None);
    eventually("the socket is gone", || !dir.socket().exists());
}

#[test]
fn numbers_of_queues_and_threads_out_of_range_are_refused() {
    let daemon = Daemon::with(Options { num_queues: 256, ..Options::default() });
    let mut stream = daemon.connect();
    assert_eq!(ask(&mut stream, Request::GetQueueNum, 0, &[]), 256);
    let dir = Dir::new();
    for num_queues in [0, 257, u16::MAX] {
        let config = daemon.config(Listen::Path(dir.socket()), num_queues);
        let error = daemon.start(config).err().unwrap();
        assert!(error.to_string().contains("num-queues"), "{error}");
    }
    let mut config = daemon.config(Listen::Path(dir.socket()), 1);
    config.io_threads.clear();
    let error = daemon.start(config).err().unwrap();
    assert!(error.to_string().contains("I/O thread"), "{error}");
    let mut config = daemon.config(Listen::Path(dir.socket()), 1);
    config.logical_block_size = 1000;
    let error = daemon.start(config).err().unwrap();
    assert!(error.to_string().contains("logical-block-size"), "{error}");
    assert!(!dir.socket().exists());
}

/// A node that no loop is good enough for.
struct Picky;

impl BlockNode for Picky {
    fn name(&self) -> &str {
        "picky"
    }

    fn geometry(&self) -> Geometry {
        common::RamDisk::new(1).geometry()
    }

    fn open_channel(self: Arc<Self>, _: &EventLoop) -> std::io::Result<std::rc::Rc<dyn Channel>> {
        Err(std::io::Error::other("not here"))
    }
}

#[test]
fn a_node_that_cannot_work_on_a_thread_shows_when_the_export_starts() {
    let daemon = Daemon::new();
    let dir = Dir::new();
    let config = daemon.config(Listen::Path(dir.socket()), 1);
    let error = daemon.start_with(config, Arc::new(Picky)).err().unwrap();
    assert_eq!(error.to_string(), "cannot work on I/O thread io0: not here");
    assert!(!dir.socket().exists());
}

#[test]
fn an_io_thread_that_has_stopped_is_an_error_and_no_hang() {
    let daemon = Daemon::new();
    let dir = Dir::new();
    let gone = io_thread("gone", RingChoice::default());
    let mut config = daemon.config(Listen::Path(dir.socket()), 1);
    config.io_threads = vec![gone.handle().clone()];
    gone.stop().unwrap();
    let error = daemon.start(config).err().unwrap();
    assert!(matches!(error, ExportError::LoopGone(_)), "{error}");
}
