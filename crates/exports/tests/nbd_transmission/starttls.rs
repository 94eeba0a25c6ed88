//! TLS's handshakes are computed by the threads of the pool.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, mpsc};

use event_loop::{EventLoop, LoopConfig, PollParams, ThreadPoolConfig};
use exports::nbd::{NbdListen, NbdServer, NbdServerConfig};
use tls::{Acceptor, Endpoint, X509, X509Files};

use super::rig::{take, turn};

/// A key for this test only.
const KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgUKahz5HPECceUmbk
fAUBEOuUIlYvnDQ183YnQYQmhEehRANCAATygOPjSB8CthZq4vAdr6FnrEli2Fy4
mUsbSJwputus6Q8PW9iJ8UEFiY13l3lxgX4mFCQprXEF1Kmp5RbWcG/z
-----END PRIVATE KEY-----
";

const CERTIFICATE: &str = "\
-----BEGIN CERTIFICATE-----
MIIBgDCCASWgAwIBAgIUVeDZ5rSoVVqkR+aYP9pEcBO19xkwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyOTA1NDIwMFoYDzIxMjYxMTA1
MDU0MjAwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATygOPjSB8CthZq4vAdr6FnrEli2Fy4mUsbSJwputus6Q8PW9iJ8UEF
iY13l3lxgX4mFCQprXEF1Kmp5RbWcG/zo1MwUTAdBgNVHQ4EFgQUVf/cDWA8n+k0
YQvAGcnBoZcHhewwHwYDVR0jBBgwFoAUVf/cDWA8n+k0YQvAGcnBoZcHhewwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEAl9vYDwmWys/bCGTrowdJ
56EP+QPgYwCNAI2F9fgtUrICIQDvxxZk8WorrfuMY09zL6fLSjV1Du7a4riY4rDS
zylW3A==
-----END CERTIFICATE-----
";

fn acceptor() -> Acceptor {
    let dir = std::env::temp_dir().join(format!("starttls-{}", std::process::id()));
    fs::create_dir(&dir).unwrap();
    for (name, text) in
        [("ca-cert.pem", CERTIFICATE), ("server-cert.pem", CERTIFICATE), ("server-key.pem", KEY)]
    {
        fs::write(dir.join(name), text).unwrap();
    }
    let files = X509Files {
        dir: dir.clone(),
        endpoint: Endpoint::Server,
        verify_peer: false,
        sanity_check: false,
    };
    let credentials = X509::load(&files, None).unwrap();
    fs::remove_dir_all(dir).unwrap();
    Acceptor::new(&credentials, None).unwrap()
}

fn connect(event_loop: &EventLoop, address: &SocketAddr) -> UnixStream {
    let client = UnixStream::connect_addr(address).unwrap();
    client.set_nonblocking(true).unwrap();
    take(&client, &mut [0; 18], || turn(event_loop));
    client
}

/// While the only thread of the pool is busy, a TLS record gets no answer, and the loop greets other clients.
#[test]
fn the_loop_leaves_tls_handshakes_to_the_pool() {
    let thread_pool = ThreadPoolConfig { min: 0, max: 1 };
    let config = LoopConfig { thread_pool, poll: PollParams::OFF, ..LoopConfig::default() };
    let event_loop = EventLoop::new(config).unwrap();
    let name = format!("nbd-starttls-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    let config = NbdServerConfig {
        listen: NbdListen::Fds(vec![Arc::new(listener.into())]),
        max_connections: 0,
        handshake_max_seconds: 0,
        tls: Some(acceptor()),
        held: false,
    };
    let _server = NbdServer::start(&event_loop, config).unwrap();
    let (release, released) = mpsc::channel::<()>();
    let (begin, begun) = mpsc::channel();
    let busy = event_loop.offload(move || begin.send(()).is_ok() && released.recv().is_ok());
    while begun.try_recv().is_err() {
        turn(&event_loop);
    }

    let mut client = connect(&event_loop, &address);
    client.write_all(b"\0\0\0\x01IHAVEOPT\0\0\0\x05\0\0\0\0").unwrap();
    take(&client, &mut [0; 20], || turn(&event_loop));
    // A handshake record with a message of an unknown type: the answer is an alert.
    client.write_all(b"\x16\x03\x01\0\x04\xff\0\0\0").unwrap();
    for _ in 0..20 {
        // More turns than the server needs to receive the record.
        connect(&event_loop, &address);
    }
    let answer = client.read(&mut [0; 1]).unwrap_err();
    assert_eq!(answer.kind(), ErrorKind::WouldBlock);

    release.send(()).unwrap();
    let mut alert = [0; 7];
    take(&client, &mut alert, || turn(&event_loop));
    assert_eq!(alert[0], 21, "{alert:?}");
    drop(busy);
}
