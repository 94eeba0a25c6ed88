//! The `nbd` driver with TLS: servers of ringmill and of QEMU, and servers that it must refuse.

use std::path::Path;
use std::process::{Child, Command};

use integration::nbd::{client_output, nbd_export, nbd_server, nbd_uri};
use integration::tls::{Authority, LONG_AGO, NOW};
use integration::{Image, Port, Scratch, Server, ServerCommand, eventually, tool};

/// A daemon that serves an image as `disk` by TLS over TCP, to clients with certificates.
fn serve(scratch: &Scratch, image: &Image, creds: &Path, port: u16) -> Server {
    let object = format!("tls-creds-x509,id=tls0,endpoint=server,dir={}", creds.display());
    let address = format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port},tls-creds=tls0");
    let command = ServerCommand::new(scratch).named("origin").arg("--object").arg(object);
    let command = command.file("disk", image, "discard=unmap").arg("--nbd-server").arg(address);
    nbd_export(command, "disk", ",writable=on").start()
}

/// A daemon with a node of that server's export.
fn connect<'a>(scratch: &'a Scratch, creds: &Path, port: u16, options: &str) -> ServerCommand<'a> {
    let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", creds.display());
    let node = format!(
        "driver=nbd,node-name=disk,server.type=inet,server.host=127.0.0.1,server.port={port},\
         export=disk,tls-creds=tls0{options}"
    );
    ServerCommand::new(scratch).arg("--object").arg(object).arg("--blockdev").arg(node)
}

/// The same, which offers the node as `disk` on a unix socket without TLS.
fn proxy(scratch: &Scratch, creds: &Path, port: u16, options: &str) -> Server {
    let command = connect(scratch, creds, port, options).iothread("io0");
    let command = nbd_server(command, scratch, "");
    nbd_export(command, "disk", ",writable=on,iothread=io0").start()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// qemu-nbd, which ends with this.
struct QemuNbd(Child);

impl Drop for QemuNbd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Copies an image to the proxied export and back, and reads and writes parts of all sizes.
fn use_it(scratch: &Scratch, source: &Image) {
    let uri = nbd_uri(scratch, "disk");
    client_output(scratch, "nbdcopy", &["--flush", text(source.path()), &uri]);
    let copy = scratch.path("copy");
    client_output(scratch, "nbdcopy", &[&uri, text(&copy)]);
    client_output(scratch, "cmp", &[text(&copy), text(source.path())]);
    let script = "
import random
rng = random.Random(11)
SIZE = 2 << 20
model = bytearray(h.pread(SIZE, 0))
for turn in range(40):
    length = rng.choice([1, 511, 4096, 16383, 16384, 16385, 65536, 300000, 1 << 20])
    offset = rng.randrange(SIZE - length + 1)
    data = rng.randbytes(length)
    h.pwrite(data, offset)
    model[offset:offset + length] = data
    buffers = []
    for _ in range(8):
        length = rng.choice([1, 100, 4096, 20000, 100000])
        offset = rng.randrange(SIZE - length + 1)
        buffer = nbd.Buffer(length)
        buffers.append((h.aio_pread(buffer, offset), buffer, offset, length))
    for cookie, buffer, offset, length in buffers:
        while not h.aio_command_completed(cookie):
            h.poll(-1)
        assert buffer.to_bytearray() == model[offset:offset + length], (offset, length)
h.zero(1 << 20, 0)
h.flush()
assert h.pread(1 << 20, 0) == bytearray(1 << 20)
";
    client_output(scratch, "nbdsh", &["-u", &uri, "-c", script]);
}

#[test]
fn an_image_goes_in_and_out_by_tls_of_ringmill_s_server() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let (creds, alice) = (authority.server("server", NOW), authority.client("alice", NOW));
    let (source, target) =
        (Image::filled(&scratch, "source", 20), Image::empty(&scratch, "target", 20));
    let port = Port::new();
    let origin = serve(&scratch, &target, &creds, port.number());
    let server = proxy(&scratch, &alice, port.number(), ",tls-hostname=localhost");
    use_it(&scratch, &source);
    assert!(origin.log().contains("client connected, TLSv1_3"), "{}", origin.log());
    server.stop();
    origin.stop();
    assert_eq!(target.read(0, 1 << 20), vec![0; 1 << 20]);
    assert_eq!(target.read(3 << 20, 1 << 20), source.read(3 << 20, 1 << 20));
}

#[test]
fn an_image_goes_in_and_out_by_each_version_of_tls_of_qemu_s_server() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    // QEMU 10.0's server takes no other.
    let (creds, alice) =
        (authority.server_with_rsa("server", 2048), authority.client("alice", NOW));
    let nobody = authority.trusted("nobody");
    let source = Image::filled(&scratch, "source", 20);
    let old = scratch.path("old");
    std::fs::write(&old, "[overrides]\ndisabled-version = tls1.3\n").expect("a file");
    for (is_old, name) in [(false, "new-target"), (true, "old-target")] {
        let target = Image::empty(&scratch, name, 20);
        let port = Port::new();
        let number = port.number();
        let object = format!("tls-creds-x509,id=t,endpoint=server,dir={}", creds.display());
        let mut command = Command::new(tool("qemu-nbd"));
        command.args(["--object", &object, "--tls-creds", "t", "-x", "disk", "-f", "raw", "-t"]);
        command.args(["--bind", "127.0.0.1", "-p", &number.to_string(), "--shared", "4"]);
        command.arg(target.path());
        if is_old {
            command.env("GNUTLS_SYSTEM_PRIORITY_FILE", &old);
        }
        let _qemu_nbd = QemuNbd(command.spawn().expect("qemu-nbd"));
        let options = ",tls-hostname=localhost,open-timeout=10";
        let server = proxy(&scratch, &alice, number, options);
        use_it(&scratch, &source);
        server.stop();
        assert_eq!(target.read(3 << 20, 1 << 20), source.read(3 << 20, 1 << 20));
        if !is_old {
            // As soon as TLS is there, without a word.
            let (status, log) = connect(&scratch, &nobody, number, options).run();
            assert!(
                !status.success() && log.contains("check that it accepts the client's"),
                "{log}"
            );
        }
    }
}

#[test]
fn a_server_that_is_started_anew_is_found_again() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let (creds, alice) = (authority.server("server", NOW), authority.client("alice", NOW));
    let target = Image::empty(&scratch, "target", 20);
    let port = Port::new();
    let origin = serve(&scratch, &target, &creds, port.number());
    let options = ",tls-hostname=localhost,reconnect-delay=60";
    let server = proxy(&scratch, &alice, port.number(), options);
    let uri = nbd_uri(&scratch, "disk");
    let write = |byte: u8| {
        let script = format!("h.pwrite(bytearray([{byte}]) * 300000, {byte} * 300000); h.flush()");
        client_output(&scratch, "nbdsh", &["-u", &uri, "-c", &script]);
    };
    write(1);
    origin.kill();
    eventually("the lost connection to be noticed", || {
        server.log().contains("connecting again").then_some(())
    });
    let origin = serve(&scratch, &target, &creds, port.number());
    write(2);
    server.stop();
    origin.stop();
    for byte in [1, 2] {
        assert_eq!(target.read(u64::from(byte) * 300_000, 300_000), vec![byte; 300_000]);
    }
}

#[test]
fn servers_that_cannot_prove_their_name_are_refused() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let (creds, alice) = (authority.server("server", NOW), authority.client("alice", NOW));
    let stranger = Authority::new(&scratch, "other").client("mallory", NOW);
    let image = Image::empty(&scratch, "disk.img", 8);
    let port = Port::new();
    let origin = serve(&scratch, &image, &creds, port.number());
    let name = ",tls-hostname=localhost";
    let nobody = authority.trusted("nobody");
    for (creds, options, why) in [
        (&alice, ",tls-hostname=example.org", "not valid for name \"example.org\""),
        (&stranger, name, "is of no CA that is known"),
        (&nobody, name, "CertificateRequired"),
    ] {
        let (status, log) = connect(&scratch, creds, port.number(), options).run();
        assert!(!status.success() && log.contains(why), "{why}: {log}");
    }
    origin.stop();
    let late = authority.server("late", LONG_AGO);
    let object =
        format!("tls-creds-x509,id=tls0,endpoint=server,sanity-check=off,dir={}", late.display());
    let address =
        format!("addr.type=inet,addr.host=127.0.0.1,addr.port={},tls-creds=tls0", port.number());
    let command = ServerCommand::new(&scratch).named("late").arg("--object").arg(object);
    let command = command.file("disk", &image, "").arg("--nbd-server").arg(address);
    let origin = nbd_export(command, "disk", "").start();
    let (status, log) = connect(&scratch, &alice, port.number(), name).run();
    assert!(!status.success() && log.contains("the peer's certificate has expired"), "{log}");
    origin.stop();
}

#[test]
fn without_tls_on_one_side_there_is_no_connection() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let alice = authority.client("alice", NOW);
    let image = Image::empty(&scratch, "disk.img", 8);
    let port = Port::new();
    let address = format!("addr.type=inet,addr.host=127.0.0.1,addr.port={}", port.number());
    let command = ServerCommand::new(&scratch).named("origin").file("disk", &image, "");
    let origin = nbd_export(command.arg("--nbd-server").arg(address), "disk", "").start();
    let (status, log) = connect(&scratch, &alice, port.number(), "").run();
    assert!(!status.success() && log.contains("Denied by server for option 5 (starttls)"), "{log}");
    origin.stop();
}
