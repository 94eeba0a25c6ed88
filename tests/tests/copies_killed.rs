//! The daemon is killed while a mirror or a backup copies the topmost image of a chain (`sync=top`).

use crate::common;

use std::fs;
use std::sync::atomic::Ordering;

use common::peers::run;
use common::{Load, MIB, check, check_moment, connect, wait_for_status};
use integration::{Image, Qmp, Scratch, Server, ServerCommand, eventually};
use serde_json::json;

/// A daemon with an image and those behind it, which its header names.
fn serve(scratch: &Scratch, image: &str) -> Server {
    let file = scratch.path(image).display().to_string();
    let node = format!("qcow2,node-name=disk,file.driver=file,file.filename={file}");
    ServerCommand::new(scratch)
        .monitor("qmp")
        .iothread("io0")
        .args(["--blockdev", &node])
        .export("disk", "num-queues=2,iothread=io0")
        .start()
}

fn create(scratch: &Scratch, image: &str, behind: &str, format: &str, cluster: &str) {
    let cluster = format!("cluster_size={cluster}");
    let names = [behind, image].map(|name| format!("DIR/{name}"));
    let create = ["create", "-q", "-f", "qcow2", "-o", &cluster, "-F", format, "-b"];
    run("qemu-img", scratch.dir(), &[&create[..], &[&names[0], &names[1]]].concat());
}

/// Opens an image after a kill, and closes it.
fn close_properly(scratch: &Scratch, image: &str, options: &str) {
    let file = scratch.path(image).display().to_string();
    let node = format!("qcow2,node-name=n,file.driver=file,file.filename={file}{options}");
    ServerCommand::new(scratch).args(["--blockdev", &node]).start().stop();
}

/// A disk's contents as a raw image.
fn contents(scratch: &Scratch, image: &str) -> Image {
    let names = [image, "found.raw"].map(|name| format!("DIR/{name}"));
    let convert = ["convert", "-O", "raw", &names[0], &names[1]];
    run("qemu-img", scratch.dir(), &convert);
    Image::existing(&scratch.path("found.raw"))
}

/// The images of a chain, and what was written to them.
fn make_chain(scratch: &Scratch) -> Vec<u64> {
    Image::filled(scratch, "base.raw", MIB);
    create(scratch, "mid.qcow2", "base.raw", "raw", "65536");
    let server = serve(scratch, "mid.qcow2");
    let load = Load::start(connect(&server, 2), 1);
    load.go_on();
    let log = load.finish();
    server.stop();
    log
}

/// Kills the daemon at a moment of the job. `moment`: a status, or some progress.
fn kill_at(command: &str, moment: &str, cluster: &str) {
    let what = format!("{command}, {moment}, {cluster}");
    let scratch = Scratch::new();
    let log = make_chain(&scratch);
    create(&scratch, "top.qcow2", "mid.qcow2", "qcow2", "65536");
    create(&scratch, "target.qcow2", "mid.qcow2", "qcow2", cluster);
    let server = serve(&scratch, "top.qcow2");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let load = Load::start_after(log, connect(&server, 2), 2);
    load.go_on();
    let file = json!({"driver": "file", "filename": scratch.path("target.qcow2")});
    let target = json!({"driver": "qcow2", "node-name": "target", "file": file, "backing": null});
    qmp.execute("blockdev-add", target);
    let is_mirror = command == "blockdev-mirror";
    let mut job = json!({"job-id": "j", "device": "disk", "target": "target", "sync": "top",
        "auto-finalize": false, "auto-dismiss": false,
        "speed": if moment == "copying" { 8 << 20 } else { 0 }});
    if is_mirror {
        job["copy-mode"] = "write-blocking".into();
    }
    let before = load.written.load(Ordering::Relaxed);
    qmp.execute(command, job);
    let after = load.written.load(Ordering::Relaxed) + 1;
    match moment {
        "started" => {}
        "copying" => eventually("some progress", || {
            let jobs = qmp.execute("query-jobs", json!({}));
            jobs[0]["current-progress"].as_u64().filter(|done| *done > 0).map(drop)
        }),
        "ready" => {
            qmp.wait_for("BLOCK_JOB_READY");
            load.go_on();
            eventually("both sides to be equal", || {
                let job = &qmp.execute("query-block-jobs", json!({}))[0];
                (job["actively-synced"] == true).then_some(())
            });
        }
        status => {
            wait_for_status(&mut qmp, "j", status);
            load.go_on();
        }
    }
    let log = load.finish();
    let sockets = ["qmp", "disk"].map(|name| server.socket(name));
    server.kill();
    for socket in sockets {
        fs::remove_file(socket).expect("the socket of the killed daemon");
    }
    close_properly(&scratch, "top.qcow2", "");
    close_properly(&scratch, "target.qcow2", ",backing=");
    for image in ["mid.qcow2", "top.qcow2", "target.qcow2"] {
        run("qemu-img", scratch.dir(), &["check", "-q", &format!("DIR/{image}")]);
    }
    eprintln!("{what}: {} writes", log.len());
    check(&contents(&scratch, "top.qcow2"), &log, log.len());
    match moment {
        // What the mirror has answered is in its target.
        "ready" => check(&contents(&scratch, "target.qcow2"), &log, log.len()),
        "pending" => check_moment(&contents(&scratch, "target.qcow2"), &log, before..=after),
        _ => {}
    }
}

#[test]
fn a_mirror_of_the_top_is_killed() {
    for moment in ["started", "copying", "ready"] {
        kill_at("blockdev-mirror", moment, "65536");
    }
    kill_at("blockdev-mirror", "ready", "4096");
}

#[test]
fn a_backup_of_the_top_is_killed() {
    for moment in ["started", "copying", "pending"] {
        kill_at("blockdev-backup", moment, "65536");
    }
    kill_at("blockdev-backup", "pending", "131072");
}
