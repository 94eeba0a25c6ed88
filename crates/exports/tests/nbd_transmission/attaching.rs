//! A node that the second I/O thread cannot use.

use std::sync::Arc;

use event_loop::EventLoop;
use exports::nbd::{NbdExportConfig, NbdListen, NbdServer, NbdServerConfig};

use crate::common::once::Once;
use crate::nbd_transmission::rig::null;

/// The caller closes the node next, and its image's lock has to be gone then.
#[test]
fn an_export_that_a_later_thread_cannot_serve_has_dropped_the_node() {
    let event_loop = EventLoop::new(Default::default()).unwrap();
    let listen = NbdListen::Fds(Vec::new());
    let config = NbdServerConfig {
        listen,
        max_connections: 0,
        handshake_max_seconds: 0,
        tls: None,
        held: true,
    };
    let server = NbdServer::start(&event_loop, config).unwrap();
    let node = Once::over(null());
    // Both workers run on this thread, so that the first has not run when a start that does not wait returns.
    let added = server.add(NbdExportConfig {
        id: "disk".into(),
        name: "disk".into(),
        description: String::new(),
        node: node.clone(),
        io_threads: vec![event_loop.handle(), event_loop.handle()],
        writable: false,
        writethrough: false,
        allocation_depth: false,
        bitmaps: Vec::new(),
    });
    let (error, owners) =
        event_loop.block_on(async move { (added.await.err(), Arc::strong_count(&node)) }).unwrap();
    let error = error.expect("the second thread fails").to_string();
    assert!(error.ends_with(": not twice"), "{error}");
    assert_eq!(owners, 1, "a worker still has the node");
}
