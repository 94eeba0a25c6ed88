//! NBD with TLS: real clients, with valid and other certificates.

use std::path::Path;

use integration::nbd::{RawNbd, client, client_output, nbd_export, nbd_server, nbd_uri, nbds_uri};
use integration::tls::{Authority, LONG_AGO, NOW};
use integration::{Image, Port, Scratch, Server, ServerCommand, eventually};

/// `--object` for a server's credentials.
fn with_creds<'a>(command: ServerCommand<'a>, dir: &Path, more: &str) -> ServerCommand<'a> {
    let dir = dir.display();
    let object = format!("tls-creds-x509,id=tls0,endpoint=server,dir={dir}{more}");
    command.arg("--object").arg(object)
}

/// A daemon that offers an image as `disk`, writable and with TLS, on two threads.
fn serve(scratch: &Scratch, image: &Image, creds: &Path, more: &str, options: &str) -> Server {
    let command = ServerCommand::new(scratch).iothread("io0").iothread("io1");
    let command = with_creds(command, creds, more).file("disk", image, "discard=unmap");
    let command = nbd_server(command, scratch, &format!(",tls-creds=tls0{options}"));
    nbd_export(command, "disk", ",writable=on,iothread.0=io0,iothread.1=io1").start()
}

/// The options of a QEMU program for the export: an object, and the image's options.
fn qemu_image(scratch: &Scratch, creds: &Path) -> (String, String) {
    let object = format!("tls-creds-x509,id=t,endpoint=client,dir={}", creds.display());
    let socket = scratch.path("nbd.sock");
    let image = format!(
        "driver=nbd,server.type=unix,server.path={},export=disk,tls-creds=t,tls-hostname=localhost",
        socket.display()
    );
    (object, image)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn libnbd_s_and_qemu_s_programs_copy_an_image_in_and_out() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let (server_creds, alice) = (authority.server("server", NOW), authority.client("alice", NOW));
    let source = Image::filled(&scratch, "source", 20);
    let target = Image::empty(&scratch, "target", 20);
    let copy = Image::empty(&scratch, "copy", 20);
    let server = serve(&scratch, &target, &server_creds, "", "");
    let uri = nbds_uri(&scratch, "disk", &alice);
    let info = client_output(&scratch, "nbdinfo", &["--json", &uri]);
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!((&info["TLS"], &info["exports"][0]["can_multi_conn"]), (&true.into(), &true.into()));
    let list = client_output(&scratch, "nbdinfo", &["--list", &nbds_uri(&scratch, "", &alice)]);
    assert!(list.contains("export=\"disk\""), "{list}");
    // Four connections with 64 requests in flight each.
    client_output(&scratch, "nbdcopy", &["--flush", text(source.path()), &uri]);
    let (object, image) = qemu_image(&scratch, &alice);
    let compare = ["compare", "--object", &object, "--image-opts", &image];
    let local = format!("driver=file,filename={}", text(source.path()));
    client_output(&scratch, "qemu-img", &[&compare[..], &[&local]].concat());
    client_output(&scratch, "nbdcopy", &[&uri, text(copy.path())]);
    assert_eq!(copy.md5(), source.md5());
    let commands = ["write -P 7 1000 300000", "read -P 7 1000 300000", "write -z 4M 1M", "flush"];
    let mut qemu_io = vec!["--object", &object, "--image-opts"];
    qemu_io.extend(commands.iter().flat_map(|command| ["-c", command]));
    qemu_io.push(&image);
    let output = client_output(&scratch, "qemu-io", &qemu_io);
    assert!(!output.contains("failed"), "{output}");
    assert!(server.log().contains("client connected, TLSv1_3 TLS13_AES"), "{}", server.log());
    server.stop();
    assert_eq!(target.read(1000, 300_000), vec![7; 300_000]);
    assert_eq!(target.read(4 << 20, 1 << 20), vec![0; 1 << 20]);
}

#[test]
fn many_requests_of_all_sizes_over_tcp_with_each_version_of_tls() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let (server_creds, alice) = (authority.server("server", NOW), authority.client("alice", NOW));
    let image = Image::empty(&scratch, "disk.img", 8);
    let reserved = Port::new();
    let port = reserved.number();
    let address = format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port},tls-creds=tls0");
    let command = with_creds(ServerCommand::new(&scratch), &server_creds, "");
    let command = command.file("disk", &image, "").arg("--nbd-server").arg(address);
    let server = nbd_export(command, "disk", ",writable=on").start();
    let script = format!(
        "
import random
rng = random.Random(7)
uri = 'nbds://127.0.0.1:{port}/disk?tls-certificates={}'
# As many as are written to and read back by turns, each with a part of its own.
handles = []
for n in range(3):
    handle = nbd.NBD()
    handle.set_uri_allow_local_file(True)
    handle.connect_uri(uri)
    assert handle.get_tls_negotiated()
    handles.append(handle)
SIZE = 2 << 20
model = [bytearray(SIZE) for _ in handles]
for n, handle in enumerate(handles):
    handle.zero(SIZE, n * SIZE)
for turn in range(15):
    for n, handle in enumerate(handles):
        length = rng.choice([1, 511, 4096, 16383, 16384, 16385, 65536, 300000, 1 << 20])
        offset = rng.randrange(SIZE - length + 1)
        data = rng.randbytes(length)
        handle.pwrite(data, n * SIZE + offset)
        model[n][offset:offset + length] = data
    for n, handle in enumerate(handles):
        buffers = []
        for _ in range(8):
            length = rng.choice([1, 100, 4096, 20000, 100000])
            offset = rng.randrange(SIZE - length + 1)
            buffer = nbd.Buffer(length)
            buffers.append((handle.aio_pread(buffer, n * SIZE + offset), buffer, offset, length))
        for cookie, buffer, offset, length in buffers:
            while not handle.aio_command_completed(cookie):
                handle.poll(-1)
            assert buffer.to_bytearray() == model[n][offset:offset + length], (n, offset, length)
for n, handle in enumerate(handles):
    other = handles[(n + 1) % 3]
    assert bytes(other.pread(SIZE, n * SIZE)) == bytes(model[n])
    handle.flush()
for handle in handles:
    handle.shutdown()
",
        text(&alice)
    );
    // GnuTLS' configuration to disable a version.
    let old = scratch.path("old");
    std::fs::write(&old, "[overrides]\ndisabled-version = tls1.3\n").expect("a file");
    let old = format!("GNUTLS_SYSTEM_PRIORITY_FILE={}", text(&old));
    client_output(&scratch, "nbdsh", &["-c", &script]);
    client_output(&scratch, "env", &[&old, "nbdsh", "-c", &script]);
    for version in ["TLSv1_3 TLS13_AES_256_GCM", "TLSv1_2 TLS_ECDHE_ECDSA_WITH_CHACHA20"] {
        assert_eq!(server.log().matches(version).count(), 3, "{}", server.log());
    }
    server.stop();
}

#[test]
fn nothing_is_revealed_before_tls() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let server_creds = authority.server("server", NOW);
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = serve(&scratch, &image, &server_creds, ",verify-peer=off", "");
    let socket = scratch.path("nbd.sock");
    let tls_required = 0x8000_0005u32;
    let mut raw = RawNbd::greet(&socket);
    // List, info, go, structured replies, contexts, and an unknown option.
    for option in [3, 6, 7, 8, 9, 10, 11, 99] {
        raw.option(option, b"\0\0\0\x04disk\0\0");
        assert_eq!(raw.option_reply(), (option, tls_required));
    }
    // The option "export name" has no reply.
    raw.option(1, b"disk");
    raw.wait_for_close();
    let plain = client(&scratch, "nbdinfo", &[&nbd_uri(&scratch, "disk")]);
    assert!(!plain.status.success(), "{plain:?}");
    // A client without a certificate, as the server does not request one.
    let uri = nbds_uri(&scratch, "disk", &authority.trusted("anybody"));
    assert_eq!(client_output(&scratch, "nbdinfo", &["--size", &uri]).trim(), "1048576");
    server.stop();

    // A server without TLS refuses a client that requires TLS.
    let command = ServerCommand::new(&scratch).named("plain").file("disk", &image, "read-only=on");
    let server = nbd_export(nbd_server(command, &scratch, ""), "disk", "").start();
    let mut raw = RawNbd::greet(&socket);
    raw.option(5, b"");
    assert_eq!(raw.option_reply(), (5, 0x8000_0002));
    let refused = client(&scratch, "nbdinfo", &[&uri]);
    assert!(!refused.status.success(), "{refused:?}");
    server.stop();
}

#[test]
fn an_rsa_key_of_another_size_than_the_library_takes_is_refused_by_its_size() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    for bits in [1024, 2432] {
        let folder = authority.server_with_rsa(&format!("rsa{bits}"), bits);
        let command = ServerCommand::new(&scratch);
        let (status, said) = with_creds(command, &folder, "").run();
        assert!(!status.success(), "{said}");
        let why = format!(
            "it is an RSA key of {bits} bits, and the TLS library signs with those of 2048, 3072 and \
             4096 bits only; make one of these, or one for an elliptic curve"
        );
        assert!(said.contains(&why), "{said}");
    }
    let image = Image::filled(&scratch, "disk.img", 1);
    let folder = authority.server_with_rsa("rsa3072", 3072);
    let server = serve(&scratch, &image, &folder, "", "");
    let alice = authority.client("alice", NOW);
    client_output(&scratch, "nbdinfo", &[&nbds_uri(&scratch, "disk", &alice)]);
    server.stop();
}

#[test]
fn each_refusal_is_sent_to_the_client_and_logged() {
    let scratch = Scratch::new();
    let (authority, other) = (Authority::new(&scratch, "ca"), Authority::new(&scratch, "other"));
    let server_creds = authority.server("server", NOW);
    let image = Image::filled(&scratch, "disk.img", 1);
    let command = with_creds(ServerCommand::new(&scratch), &server_creds, "");
    let command = command.arg("--object").arg(
        "authz-list,id=auth0,rules.0.match=O=Ringmill,,CN=a*,rules.0.format=glob,\
         rules.0.policy=allow",
    );
    let command = command.file("disk", &image, "");
    let command = nbd_server(command, &scratch, ",tls-creds=tls0,tls-authz=auth0");
    let server = nbd_export(command, "disk", "").start();

    let alice = authority.client("alice", NOW);
    let good = ["--size", &nbds_uri(&scratch, "disk", &alice)];
    assert_eq!(client_output(&scratch, "nbdinfo", &good).trim(), "1048576");

    let stranger = other.client("anna", NOW);
    std::fs::copy(authority.certificate(), stranger.join("ca-cert.pem")).expect("a copy");
    let alert = "A TLS fatal alert has been received";
    for (folder, to_client, logged) in [
        (authority.trusted("nobody"), alert, "has shown no certificate"),
        (stranger, alert, "is of no CA that is known"),
        (authority.client("adam", LONG_AGO), alert, "has expired"),
        (authority.client("bob", NOW), alert, "'O=Ringmill,CN=bob' is not authorized"),
    ] {
        let refused = client(&scratch, "nbdinfo", &[&nbds_uri(&scratch, "disk", &folder)]);
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success(), "{folder:?}");
        assert!(error.contains(to_client), "{folder:?}: {error}");
        let line = || server.log().lines().find(|line| line.contains(logged)).map(str::to_owned);
        let line = eventually(logged, line);
        assert!(line.contains("NBD server: client sent away: "), "{line}");
    }
    let lines = server.log().lines().filter(|line| line.contains("sent away")).count();
    assert_eq!(lines, 4, "{}", server.log());
    // A client that does not trust the server.
    let (object, disk) = qemu_image(&scratch, &other.client("axel", NOW));
    let info = ["info", "--object", &object, "--image-opts", &disk];
    let refused = client(&scratch, "qemu-img", &info);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(error.contains("The certificate hasn't got a known issuer"), "{error}");
    assert_eq!(client_output(&scratch, "nbdinfo", &good).trim(), "1048576");
    server.stop();
}
