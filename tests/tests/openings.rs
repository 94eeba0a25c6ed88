//! A server that does not answer while an image on it is opened: other commands and the end of the daemon do not wait.

use std::fs;
use std::path::PathBuf;

use integration::nbd::{client_output, nbd_export, nbd_server};
use integration::{Qmp, Scratch, Server, ServerCommand, eventually};
use nix::sys::signal::Signal;
use serde_json::json;

const ADD: &str = r#"{"execute": "blockdev-add", "arguments": {"driver": "qcow2", "node-name": "disk", "file": "far", "read-only": true}}"#;
const REOPEN: &str = r#"{"execute": "blockdev-reopen", "arguments": {"options": [{"driver": "qcow2", "node-name": "disk", "file": "far"}]}}"#;

/// A daemon that exports the bytes of a qcow2 image, and one with a node on that export.
fn daemons(back: &Scratch, fore: &Scratch) -> (Server, Server) {
    client_output(back, "qemu-img", &["create", "-q", "-f", "qcow2", "disk.qcow2", "1M"]);
    let node = format!("file,node-name=bytes,filename={}", back.path("disk.qcow2").display());
    let far = nbd_server(ServerCommand::new(back).arg("--blockdev").arg(node), back, "");
    let far = nbd_export(far, "bytes", ",writable=on").start();
    let node = format!(
        "nbd,node-name=far,server.type=unix,server.path={},export=bytes",
        back.path("nbd.sock").display()
    );
    let near = ServerCommand::new(fore).named("near").arg("--blockdev").arg(node);
    (far, near.monitor("one").monitor("other").arg("--stop-timeout").arg("5").start())
}

/// Waits for the thread that opens the image.
fn is_being_opened(server: &Server) {
    eventually("the thread that opens", || {
        let names: Vec<PathBuf> = server.tasks().map(|task| task.join("comm")).collect();
        let mut names = names.into_iter().filter_map(|name| fs::read_to_string(name).ok());
        names.find(|name| name == "open\n").map(drop)
    });
}

#[test]
fn an_opening_that_waits_for_a_server_delays_nothing_else() {
    let (back, fore) = (Scratch::new(), Scratch::new());
    let (far, server) = daemons(&back, &fore);
    let (mut one, mut other) =
        (Qmp::connect(&server.socket("one")), Qmp::connect(&server.socket("other")));
    far.pause();
    one.send(ADD);
    is_being_opened(&server);
    let refused = other.refused("blockdev-del", json!({"node-name": "far"}));
    assert!(refused.contains("being opened"), "{refused}");
    let null = json!({"driver": "null-co", "node-name": "null"});
    other.execute("blockdev-add", null.clone());
    let nodes = other.execute("query-named-block-nodes", json!({}));
    let mut names: Vec<_> =
        nodes.as_array().expect("a list").iter().map(|n| &n["node-name"]).collect();
    names.sort_by_key(|name| name.to_string());
    assert_eq!(names, ["far", "null"]);
    far.signal(Signal::SIGCONT);
    assert_eq!(one.answer(), json!({"return": {}}));
    assert_eq!(other.refused("blockdev-add", null), "Duplicate nodes with node-name='null'");
    // The one command of the two is executed on the whole graph: the loop runs, and commands that need no node are answered.
    far.pause();
    one.send(REOPEN);
    is_being_opened(&server);
    other.execute("query-version", json!({}));
    far.signal(Signal::SIGCONT);
    assert_eq!(one.answer(), json!({"return": {}}));
    let nodes = other.execute("query-named-block-nodes", json!({}));
    let disk = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "disk");
    assert_eq!(disk.expect("it is there")["ro"], false);
    one.execute("blockdev-del", json!({"node-name": "disk"}));
    server.stop();
    far.stop();
}

#[test]
fn a_signal_ends_the_daemon_while_an_image_is_opened() {
    let (back, fore) = (Scratch::new(), Scratch::new());
    let (far, mut server) = daemons(&back, &fore);
    let mut one = Qmp::connect(&server.socket("one"));
    far.pause();
    one.send(ADD);
    is_being_opened(&server);
    server.signal(Signal::SIGTERM);
    let status = server.wait();
    assert!(status.code().is_some(), "{status}: {}", server.log());
    far.signal(Signal::SIGCONT);
    far.stop();
}
