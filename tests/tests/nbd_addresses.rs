//! NBD on abstract unix sockets and on vsock, as client and as server, within the sandbox.

use crate::common;

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Command, Stdio};

use common::peers::Peers;
use integration::nbd::{client, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{
    Image, Port, Qmp, Scratch, Server, ServerCommand, eventually, tied_command, tool,
};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, socket};
use serde_json::json;
use test_requirements::{Needs, untested};

/// A server that ends with this.
struct Peer(std::process::Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// QEMU's server on the abstract address, which has no file.
fn qemu(image: &Image, name: &str, tight: &str) -> Peer {
    let mut command: Command = tied_command(&tool("qemu-storage-daemon"));
    let address = format!("addr.type=unix,addr.path={name},addr.abstract=on,addr.tight={tight}");
    let file = format!("file,node-name=disk,filename={}", image.path().display());
    command.args(["--blockdev", &file, "--nbd-server", &address]);
    command.args(["--export", "nbd,id=e,node-name=disk,writable=on"]);
    let peer = Peer(command.spawn().expect("it starts"));
    let mut bytes = name.as_bytes().to_vec();
    if tight == "off" {
        bytes.resize(107, 0);
    }
    let address = SocketAddr::from_abstract_name(&bytes).expect("a short name");
    eventually("QEMU's server", || UnixStream::connect_addr(&address).ok());
    peer
}

/// A daemon without a monitor, whose sandbox knows the server from the command line.
fn front(scratch: &Scratch, server: &str) -> Server {
    let node = format!("driver=nbd,node-name=disk,{server},export=disk,reconnect-delay=600");
    let command = nbd_server(ServerCommand::new(scratch).arg("--blockdev").arg(node), scratch, "");
    nbd_export(command, "disk", ",writable=on").start()
}

#[test]
fn an_abstract_server_is_reached_again_after_its_end() {
    for tight in ["on", "off"] {
        let scratch = Scratch::new();
        let image = Image::empty(&scratch, "disk.img", 4);
        let name = format!("ringmill-abstract-{}-{tight}", std::process::id());
        let first = qemu(&image, &name, tight);
        let address =
            format!("server.type=unix,server.path={name},server.abstract=on,server.tight={tight}");
        let server = front(&scratch, &address);
        let uri = nbd_uri(&scratch, "disk");
        client_output(&scratch, "qemu-io", &["-fraw", "-c", "write -P 7 1M 1M", &uri]);
        drop(first);
        let second = qemu(&image, &name, tight);
        client_output(&scratch, "qemu-io", &["-fraw", "-c", "read -P 7 1M 1M", &uri]);
        server.stop();
        drop(second);
    }
}

/// Whether this kernel connects vsock sockets of one machine. `Err`: why it does not.
fn vsock_of_this_machine(port: u32) -> Result<(), Errno> {
    let fd = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    connect(fd.as_raw_fd(), &VsockAddr::new(LOCAL, port))
}

/// `VMADDR_CID_LOCAL`.
const LOCAL: u32 = 1;

/// The sandbox of a daemon with a monitor leaves vsock in reach: the error is that of the connection.
#[test]
fn vsock_is_tried_within_the_sandbox() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let address = json!({"type": "vsock", "cid": "1", "port": "10809"});
    let node = json!({"driver": "nbd", "node-name": "disk", "server": address});
    let error = qmp.refused("blockdev-add", node);
    let expected = vsock_of_this_machine(10809).expect_err("no server").desc();
    assert_eq!(error, format!("Failed to connect to '1:10809': {expected}"));
    server.stop();
}

#[test]
fn an_image_goes_over_vsock() {
    let scratch = Scratch::new();
    let port = 20000 + std::process::id() % 20000;
    let mut command: Command = tied_command(&tool("nbdkit"));
    command.args(["-f", "--vsock", "--port", &port.to_string(), "memory", "4M"]);
    let peer = Peer(command.spawn().expect("it starts"));
    let reached = vsock_of_this_machine(port);
    if let Err(errno @ (Errno::EAFNOSUPPORT | Errno::ENODEV | Errno::ETIMEDOUT)) = reached {
        untested(Needs::Vsock, format!("no vsock_loopback: {}", errno.desc()));
        return;
    }
    eventually("nbdkit", || vsock_of_this_machine(port).ok());
    let server = front(&scratch, &format!("server.type=vsock,server.cid=1,server.port={port}"));
    let uri = nbd_uri(&scratch, "disk");
    client_output(&scratch, "qemu-io", &["-fraw", "-c", "write -P 7 1M 1M", &uri]);
    client_output(&scratch, "qemu-io", &["-fraw", "-c", "read -P 7 1M 1M", &uri]);
    server.stop();
    drop(peer);
}

#[test]
fn the_server_listens_on_an_abstract_address() {
    for tight in ["on", "off"] {
        let scratch = Scratch::new();
        let image = Image::empty(&scratch, "disk.img", 4);
        let name = format!("ringmill-server-{}-{tight}", std::process::id());
        let address =
            format!("addr.type=unix,addr.path={name},addr.abstract=on,addr.tight={tight}");
        // Without a monitor: the sandbox knows the address from the command line.
        let command = ServerCommand::new(&scratch).file("disk", &image, "");
        let command = nbd_export(command.arg("--nbd-server").arg(address), "disk", ",writable=on");
        let server = command.start();
        let node = format!(
            "driver=nbd,export=disk,server.type=unix,server.path={name},server.abstract=on,server.tight={tight}"
        );
        let io = ["--image-opts", "-c", "write -P 7 1M 1M", "-c", "read -P 7 1M 1M", &node];
        client_output(&scratch, "qemu-io", &io);
        let file = scratch.path(&name);
        assert!(!file.exists());
        server.stop();
    }
}

/// What `nbd-server-start` says is what qemu-storage-daemon says.
#[test]
fn addresses_of_the_server_are_checked_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let unix = |data| json!({"addr": {"type": "unix", "data": data}});
    let vsock = |cid: &str, port: &str| json!({"addr": {"type": "vsock", "data": {"cid": cid, "port": port}}});
    let long = "x".repeat(108);
    for refused in [
        unix(json!({"path": long, "abstract": true})),
        vsock("x", "1"),
        vsock("1", "x"),
        json!({"addr": {"type": "vsock", "data": {"cid": "1"}}}),
    ] {
        peers.both("nbd-server-start", refused);
    }
    // No machine has this number. Without vsock there are other reasons.
    peers.both("nbd-server-start", vsock("9", "1"));
    for (n, tight) in [true, false].into_iter().enumerate() {
        for side in peers.sides() {
            let name = format!("{}{n}", side.folder.display());
            let start = unix(json!({"path": name, "abstract": true, "tight": tight}));
            side.qmp.execute("nbd-server-start", start);
            side.qmp.execute("nbd-server-stop", json!({}));
        }
    }
    peers.stop();
}

#[test]
fn the_server_listens_on_vsock() {
    let scratch = Scratch::new();
    let port = 40000 + std::process::id() % 20000;
    let image = Image::empty(&scratch, "disk.img", 4);
    let address = format!("addr.type=vsock,addr.cid=4294967295,addr.port={port}");
    if let Err(errno) = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
    {
        untested(Needs::Vsock, format!("no vsock: {}", errno.desc()));
        return;
    }
    let command = ServerCommand::new(&scratch).file("disk", &image, "");
    let command = nbd_export(command.arg("--nbd-server").arg(address), "disk", ",writable=on");
    let server = command.start();
    if let Err(errno @ (Errno::ENODEV | Errno::ETIMEDOUT)) = vsock_of_this_machine(port) {
        untested(Needs::Vsock, format!("no vsock_loopback: {}", errno.desc()));
        server.stop();
        return;
    }
    let front_scratch = Scratch::new();
    let front =
        front(&front_scratch, &format!("server.type=vsock,server.cid=1,server.port={port}"));
    let uri = nbd_uri(&front_scratch, "disk");
    client_output(&front_scratch, "qemu-io", &["-fraw", "-c", "write -P 7 1M 1M", &uri]);
    front.stop();
    server.stop();
}

/// The daemon has released the address when it answers `nbd-server-stop`.
#[test]
fn an_address_is_free_when_the_server_has_stopped() {
    let scratch = Scratch::new();
    let port = Port::new();
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let tcp = json!({"host": "localhost", "port": port.number().to_string()});
    let name = format!("ringmill-again-{}", std::process::id());
    let mut addresses = vec![
        json!({"type": "inet", "data": tcp}),
        json!({"type": "unix", "data": {"path": name, "abstract": true}}),
    ];
    if socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).is_ok() {
        let port = 60000 + std::process::id() % 5000;
        let any = json!({"cid": "4294967295", "port": port.to_string()});
        addresses.push(json!({"type": "vsock", "data": any}));
    }
    for address in addresses {
        for _ in 0..200 {
            qmp.execute("nbd-server-start", json!({"addr": address}));
            qmp.execute("nbd-server-stop", json!({}));
        }
    }
    server.stop();
}

/// The same at the end of the daemon, for all of its servers.
#[test]
fn addresses_are_free_at_the_end_of_the_daemon() {
    let ports = [Port::new(), Port::new(), Port::new()];
    let [nbd, metrics, monitor] =
        ports.each_ref().map(|port| format!("host=localhost,port={}", port.number()));
    for _ in 0..10 {
        let scratch = Scratch::new();
        let nbd = format!("addr.type=inet,addr.{}", nbd.replace(",", ",addr."));
        let metrics = format!("addr.type=inet,addr.{}", metrics.replace(",", ",addr."));
        let chardev = format!("socket,id=tcp,{monitor},server=on,wait=off");
        let server = ServerCommand::new(&scratch)
            .args(["--nbd-server", &nbd, "--metrics", &metrics])
            .args(["--chardev", &chardev, "--monitor", "chardev=tcp"]);
        server.start().stop();
    }
}

/// A connection that the daemon inherits, and the server at its other end.
fn connections(scratch: &Scratch, image: &Image) -> Vec<(UnixStream, Peer)> {
    let connected = |command: &mut Command, name: &str| {
        let peer = Peer(command.spawn().expect("it starts"));
        let path = scratch.path(name);
        (eventually("the server", || UnixStream::connect(&path).ok()), peer)
    };
    let socket = scratch.path("qemu").display().to_string();
    let disk = image.path().display().to_string();
    let mut qemu: Command = tied_command(&tool("qemu-nbd"));
    qemu.args(["-t", "-x", "disk", "-f", "raw", "-k", &socket, &disk]);
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    let mut nbdkit: Command = tied_command(&tool("nbdkit"));
    let output: OwnedFd = theirs.try_clone().expect("another descriptor").into();
    nbdkit.args(["-s", "memory", "4M"]).stdin(Stdio::from(OwnedFd::from(theirs))).stdout(output);
    let nbdkit = Peer(nbdkit.spawn().expect("it starts"));
    vec![connected(&mut qemu, "qemu"), (ours, nbdkit)]
}

/// A daemon with a node over the socket at fd 0.
fn front_over(scratch: &Scratch, stream: UnixStream) -> Server {
    let command = ServerCommand::new(scratch).monitor("qmp").stdin(stream);
    let command = command.iothread("io0").iothread("io1").arg("--blockdev");
    let node =
        "driver=nbd,node-name=disk,server.type=fd,server.str=0,export=disk,reconnect-delay=600";
    let command = nbd_server(command.arg(node), scratch, "");
    nbd_export(command, "disk", ",writable=on,iothread.0=io0,iothread.1=io1").start()
}

#[test]
fn a_node_uses_an_inherited_connection() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 4);
    let far = nbd_server(ServerCommand::new(&scratch).named("far"), &scratch, "");
    let far = nbd_export(far.file("disk", &image, ""), "disk", ",name=disk,writable=on").start();
    let stream = UnixStream::connect(scratch.path("nbd.sock")).expect("the server listens");
    let use_it = |stream: UnixStream, end: &mut dyn FnMut()| {
        let scratch = Scratch::new();
        let server = front_over(&scratch, stream);
        let uri = nbd_uri(&scratch, "disk");
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        client_output(&scratch, "qemu-io", &["-fraw", "-c", "write -P 7 1M 1M", &uri]);
        client_output(&scratch, "qemu-io", &["-fraw", "-c", "read -P 7 1M 1M", &uri]);
        let why = qmp.refused("x-upgrade", json!({}));
        assert!(why.contains("node 'disk' uses a socket that this process inherited"), "{why}");
        let node = json!({"driver": "nbd", "node-name": "n", "server": {"type": "fd", "str": "0"}});
        let why = qmp.refused("blockdev-add", node);
        assert!(why.contains("is used already"), "{why}");
        end();
        // Whatever reconnect-delay says.
        let failed = client(&scratch, "qemu-io", &["-fraw", "-c", "read 0 4k", &uri]);
        assert!(!failed.status.success(), "{failed:?}");
        let log = server.log();
        assert!(log.contains("an inherited socket cannot be connected again"), "{log}");
    };
    let mut far = Some(far);
    use_it(stream, &mut || far.take().into_iter().for_each(Server::kill));
    for (stream, peer) in connections(&scratch, &image) {
        let mut peer = Some(peer);
        use_it(stream, &mut || drop(peer.take()));
    }
}

/// The first messages are QSD's.
#[test]
fn other_descriptors_are_refused() {
    let scratch = Scratch::new();
    let listener = UnixListener::bind(scratch.path("listener")).expect("a socket");
    for (fd, why) in [
        ("77", "File descriptor '77' is not a socket"),
        ("1", "File descriptor '1' is not a socket"),
        ("-1", "File descriptor '-1' is not a socket"),
        ("abc", "Unable to parse FD number abc"),
        ("0", "file descriptor 0 is not a connected stream socket"),
    ] {
        let node = format!("driver=nbd,node-name=disk,server.type=fd,server.str={fd}");
        let stdin = listener.try_clone().expect("another descriptor");
        let command = ServerCommand::new(&scratch).named("refused").stdin(stdin);
        let (status, said) = command.arg("--blockdev").arg(node).run();
        assert!(!status.success() && said.contains(why), "{fd}: {said}");
    }
}
