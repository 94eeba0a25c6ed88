//! The log reports a slow request, and later its completion.

use integration::nbd::{nbd_export, nbd_server, nbd_uri};
use integration::{BlkClient, Request, Scratch, Segment, ServerCommand, eventually, request, tool};
use nix::sys::signal::Signal;

/// The disk is another daemon's export. That daemon is stopped and resumed.
#[test]
fn slow_requests_and_their_completion_are_logged() {
    let (scratch, behind) = (Scratch::new(), Scratch::new());
    let back = ServerCommand::new(&behind).arg("--blockdev").arg("null-co,node-name=disk");
    let back = nbd_export(nbd_server(back, &behind, ""), "disk", ",writable=on").start();
    let socket = behind.path("nbd.sock");
    let node =
        format!("nbd,node-name=n,export=disk,server.type=unix,server.path={}", socket.display());
    let server = ServerCommand::new(&scratch).arg("--blockdev").arg(node);
    let server = nbd_server(server, &scratch, "");
    let server = nbd_export(server, "n", ",stall-timeout-ms=100,writable=on");
    let server = server
        .export("n", "stall-timeout-ms=100")
        .arg("--export")
        .arg(format!(
            "vhost-user-blk,id=quiet,node-name=n,stall-timeout-ms=0,addr.type=unix,addr.path={}",
            scratch.path("quiet.sock").display()
        ))
        .start();
    let mut blk = BlkClient::connect(&server.socket("n"), 1, 16).expect("it serves");
    let mut quiet = BlkClient::connect(&server.socket("quiet"), 1, 16).expect("it serves");
    for client in [&mut blk, &mut quiet] {
        client.read(0, 512);
    }

    back.pause();
    let segments = vec![Segment { at: 0, len: 1024, device_writes: false }];
    blk.submit(0, &Request { kind: request::OUT, sector: 8, segments });
    let segments = vec![Segment { at: 0, len: 512, device_writes: true }];
    quiet.submit(0, &Request { kind: request::IN, sector: 8, segments });
    let mut nbd = std::process::Command::new(tool("qemu-io"))
        .args(["-f", "raw", "-c", "read 4k 64k", &nbd_uri(&scratch, "n")])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("qemu-io runs");
    let told = |what: &str| {
        eventually(what, || server.log().contains(what).then_some(()));
    };
    told("export n: queue 0: write of 1024 bytes at offset 4096 takes longer than 0.100 s: ");
    told(
        "export nbd-n: connection 0: read of 65536 bytes at offset 4096 takes longer than 0.100 s: ",
    );
    let log = server.log();
    for request in ["write of 1024 bytes", "read of 65536 bytes"] {
        assert!(!log.contains(&format!("{request} at offset 4096 was answered")), "{log}");
    }

    back.signal(Signal::SIGCONT);
    assert_eq!(blk.wait(0).expect("a reply")[0].status, 0);
    assert_eq!(quiet.wait(0).expect("a reply")[0].status, 0);
    assert!(nbd.wait().expect("our child").success());
    told("export n: queue 0: write of 1024 bytes at offset 4096 was answered, within ");
    told("export nbd-n: connection 0: read of 65536 bytes at offset 4096 was answered, within ");
    let log = server.log();
    assert_eq!(log.matches("export n: queue 0: write of 1024 bytes").count(), 2, "{log}");
    assert!(!log.contains("export quiet: queue"), "{log}");
    drop((blk, quiet));
    server.stop();
    back.stop();
}
