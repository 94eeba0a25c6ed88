//! A disk that changes its size under a front end: the one of the `vhost` crate, which is told, and
//! others, which cannot be or do not listen.
#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

use crate::common;

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, mpsc};

use block::node::BlockNode;
use common::{
    Daemon, Guest, NEED_REPLY, PATIENCE, SECTOR, ask, connect, eventually, message, number,
    receive, run_on, send_with, with_reply_ack,
};
use exports::vhost_user::wire::Request;
use vhost::VhostBackend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::vhost_user::{
    Frontend, FrontendReqHandler, HandlerResult, VhostUserFrontend, VhostUserFrontendReqHandler,
};

/// Says that it was told.
struct Told(Mutex<mpsc::Sender<()>>);

impl VhostUserFrontendReqHandler for Told {
    fn handle_config_change(&self) -> HandlerResult<u64> {
        self.0.lock().unwrap().send(()).unwrap();
        Ok(0)
    }
}

fn resize(daemon: &Daemon, sectors: u64) {
    let disk = daemon.disk.clone();
    let resized = run_on(&daemon.control, move |event_loop| {
        disk.resize(sectors * SECTOR as u64, &event_loop)
    });
    assert_eq!(resized, Ok(()));
}

fn capacity(front_end: &mut Frontend) -> u64 {
    let config = front_end.get_config(0, 8, VhostUserConfigFlags::WRITABLE, &[0; 8]).unwrap().1;
    u64::from_le_bytes(config.try_into().unwrap())
}

fn start(front_end: &mut Frontend, guest: &Guest) {
    front_end.set_mem_table(&[guest.region()]).unwrap();
    let config = guest.queues[0].driver.config();
    front_end.set_vring_num(0, config.size).unwrap();
    front_end.set_vring_base(0, 0).unwrap();
    front_end.set_vring_addr(0, &common::vring_config(config)).unwrap();
    front_end.set_vring_kick(0, &guest.queues[0].kick).unwrap();
    front_end.set_vring_call(0, &guest.queues[0].call).unwrap();
    front_end.set_vring_enable(0, true).unwrap();
}

#[test]
fn a_front_end_learns_of_a_new_size_and_its_guest_can_use_it() {
    let daemon = Daemon::new();
    let mut front_end = Frontend::from_stream(connect(&daemon.socket()), 1);
    let features = front_end.get_features().unwrap();
    let offered = front_end.get_protocol_features().unwrap();
    front_end.set_protocol_features(offered & VhostUserProtocolFeatures::all()).unwrap();
    front_end.set_owner().unwrap();
    front_end.set_features(features).unwrap();
    let (sender, told) = mpsc::channel();
    let mut handler = FrontendReqHandler::new(Arc::new(Told(Mutex::new(sender)))).unwrap();
    front_end.set_backend_request_fd(&handler.get_tx_raw_fd()).unwrap();
    let mut guest = Guest::new(1, 16);
    start(&mut front_end, &guest);
    assert_eq!(capacity(&mut front_end), 2048);
    let beyond = guest.write(0, 2048, &[7; SECTOR]);
    assert_eq!(beyond, 1, "VIRTIO_BLK_S_IOERR");
    let mut expect = |sectors| {
        resize(&daemon, sectors);
        handler.handle_request().unwrap();
        told.recv_timeout(PATIENCE).unwrap();
        assert_eq!(capacity(&mut front_end), sectors);
    };
    expect(4096);
    assert_eq!(guest.write(0, 2048, &[7; SECTOR]), 0);
    assert_eq!(guest.read(0, 2048, SECTOR), [7; SECTOR]);
    expect(2048);
    assert_eq!(guest.write(0, 2048, &[7; SECTOR]), 1);
    assert_eq!(guest.write(0, 2047, &[7; SECTOR]), 0);
}

#[test]
fn a_resize_does_not_need_the_front_ends_support() {
    let daemon = Daemon::new();
    let read_capacity = |stream: &mut UnixStream| {
        let payload: Vec<u8> = [0u32, 8, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
        let payload = [payload, vec![0; 8]].concat();
        send_with(stream, &message(Request::GetConfig, 0, &payload), &[]);
        let (_, reply) = receive(stream).unwrap();
        u64::from_le_bytes(reply[12..20].try_into().unwrap())
    };
    let mut deaf = with_reply_ack(daemon.connect());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let request = message(Request::SetBackendReqFd, NEED_REPLY, &[]);
    send_with(&deaf, &request, &[theirs.as_raw_fd()]);
    assert_eq!(number(&mut deaf, Request::SetBackendReqFd as u32), 0);
    drop(theirs);
    // Far more than the socket has room for.
    for sectors in 0..2000 {
        resize(&daemon, 2048 + sectors % 2);
    }
    eventually("2049 sectors", || read_capacity(&mut deaf) == 2049);
    // Nobody at the other end any more.
    drop(ours);
    resize(&daemon, 4096);
    eventually("4096 sectors", || read_capacity(&mut deaf) == 4096);
    drop(deaf);
    let mut later = daemon.connect();
    assert_ne!(ask(&mut later, Request::GetFeatures, 0, &[]), 0);
    resize(&daemon, 8192);
    eventually("8192 sectors", || read_capacity(&mut later) == 8192);
}
