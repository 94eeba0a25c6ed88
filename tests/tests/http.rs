//! Drivers `http` and `https` on a real web server, beside qemu-storage-daemon.

use crate::common;

use std::fs;
use std::path::PathBuf;

use common::nginx::{MIB, Nginx};
use common::peers::Peers;
use integration::nbd::{client_output, nbd_uri};
use integration::tls::Authority;
use integration::{
    BlkClient, Image, Port, Qmp, Scratch, ServerCommand, eventually, request, tied_command, tool,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

#[test]
fn an_image_is_the_same_over_all_ways_to_it() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let (plain, tls) = (nginx.url(""), nginx.tls_url(""));
    let user = "username=user,password-secret=password";
    for node in [
        format!("driver=http,url={plain}/disk.img"),
        format!("driver=http,url={plain}/disk.img,readahead=0"),
        format!("driver=http,url={plain}/moved/"),
        format!("driver=http,url={plain}/private/disk.img,{user}"),
        format!("driver=https,url={tls}/disk.img"),
        format!("driver=https,url={tls}/private/disk.img,{user},readahead=1M"),
        format!("driver=https,url={tls}/disk.img,sslverify=off"),
    ] {
        let scratch = Scratch::new();
        let server = nginx.daemon(&scratch, &node);
        let copy = scratch.path("copy").display().to_string();
        client_output(&scratch, "nbdcopy", &[&nbd_uri(&scratch, "web"), &copy]);
        client_output(&scratch, "qemu-img", &["compare", "-fraw", "-Fraw", &nginx.image(), &copy]);
        assert!(!server.log().contains("pass word"));
        server.stop();
    }
}

#[test]
fn a_server_that_is_not_trusted_or_leads_elsewhere_is_refused_with_the_reason() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let refused = |node: String, authority: &str| {
        let scratch = Scratch::new();
        let command = ServerCommand::new(&scratch).env("SSL_CERT_FILE", authority);
        let (status, log) =
            command.arg("--blockdev").arg(format!("{node},node-name=w,read-only=on")).run();
        assert!(!status.success());
        log
    };
    let authority = nginx.authority.display().to_string();
    let other = Authority::new(&web, "other").certificate().display().to_string();
    let log = refused(format!("driver=https,url={}", nginx.tls_url("/disk.img")), &other);
    assert!(log.contains("invalid peer certificate: UnknownIssuer"), "{log}");
    assert!(log.contains("SSL_CERT_FILE in the daemon's environment"), "{log}");
    let log = refused(format!("driver=http,url={}", nginx.url("/private/disk.img")), &authority);
    assert!(log.contains("username and password-secret"), "{log}");
    let log = refused(format!("driver=http,url={}", nginx.url("/whole/disk.img")), &authority);
    assert!(log.contains("Server does not support 'range' (byte ranges)."), "{log}");
    // Landlock: without a monitor, only ports of the command line, and the usual ones.
    let log = refused(format!("driver=http,url={}", nginx.url("/away/")), &authority);
    assert!(log.contains("Permission denied"), "{log}");
    // A proxy that is not there.
    let (scratch, port) = (Scratch::new(), Port::new());
    let node = format!("driver=http,url={},node-name=w,read-only=on", nginx.url("/disk.img"));
    let proxy = format!("http://user:5ec3e7@localhost:{}", port.number());
    let command = ServerCommand::new(&scratch).env("http_proxy", proxy).env("no_proxy", "");
    let (status, log) = command.arg("--blockdev").arg(node).run();
    assert!(!status.success());
    let named = format!("names the proxy 'http://localhost:{}/'", port.number());
    assert!(log.contains(&named) && !log.contains("5ec3e7"), "{log}");
}

#[test]
fn a_copy_goes_on_when_the_server_is_back() {
    let web = Scratch::new();
    let mut nginx = Nginx::new(&web);
    let scratch = Scratch::new();
    let node = format!("driver=http,url={},reconnect-delay=600", nginx.url("/slow/disk.img"));
    let server = nginx.daemon(&scratch, &node);
    let copy = scratch.path("copy").display().to_string();
    let mut client = tied_command(&tool("nbdcopy"))
        .args(["--requests=4", &nbd_uri(&scratch, "web"), &copy])
        .spawn()
        .expect("nbdcopy runs");
    eventually("the first bytes", || fs::metadata(&copy).ok().filter(|file| file.len() > 0));
    nginx.kill();
    eventually("the log of it", || {
        server.log().contains("requests wait for up to 600 seconds").then_some(())
    });
    assert!(client.try_wait().expect("our child").is_none());
    nginx.start();
    assert!(client.wait().expect("our child").success());
    client_output(&scratch, "qemu-img", &["compare", "-fraw", "-Fraw", &nginx.image(), &copy]);
    assert!(server.log().contains("the server answers again"), "{}", server.log());
    server.stop();
}

#[test]
fn another_image_under_the_url_is_an_error_that_names_both() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let scratch = Scratch::new();
    let server = nginx.daemon(&scratch, &format!("driver=http,url={}", nginx.url("/disk.img")));
    let read = ["-r", "-f", "raw", "-c", "read 1M 64k"];
    let uri = nbd_uri(&scratch, "web");
    client_output(&scratch, "qemu-io", &[&read[..], &[&uri]].concat());
    fs::rename(nginx.image(), web.path("before")).expect("the image");
    fs::write(nginx.image(), vec![7; 3 << 20]).expect("another image");
    let output = std::process::Command::new(tool("qemu-io")).args(read).arg(&uri).output();
    let output = output.expect("qemu-io runs");
    assert!(String::from_utf8_lossy(&output.stdout).contains("read failed: Input/output error"));
    let log = server.log();
    let line = log.lines().find(|line| line.contains("the image on the server has changed"));
    let line = line.unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains(&format!("opened with {} bytes, ETag", (MIB << 20) + 100)), "{line}");
    assert!(line.contains(&format!("is now {} bytes, ETag", 3 << 20)), "{line}");
    // A live upgrade does not change the disk of the clients that are connected.
    server.signal(Signal::SIGUSR2);
    eventually("the end of the upgrade", || {
        server.log().contains("node 'web': the image on the server has changed").then_some(())
    });
    fs::rename(web.path("before"), nginx.image()).expect("the image");
    client_output(&scratch, "qemu-io", &[&read[..], &[&uri]].concat());
    server.stop();
}

/// Members of a node in `query-named-block-nodes` that name where it is.
fn place(qmp: &mut Qmp, node: &str) -> Value {
    let nodes = qmp.execute("query-named-block-nodes", json!({}));
    let found = nodes.as_array().into_iter().flatten().find(|known| known["node-name"] == node);
    let found = found.expect("the node");
    json!([found["file"], found["drv"], found["ro"], found["image"]["virtual-size"]])
}

#[test]
fn options_are_taken_and_refused_as_by_qemu_storage_daemon() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let secret = json!({"qom-type": "secret", "id": "password", "data": "pass word"});
    peers.execute("object-add", secret);
    let url = nginx.url("/disk.img");
    let node = |driver: &str, more: Value| {
        let plain = json!({"driver": driver, "node-name": "n", "read-only": true});
        integration::merged(plain, &more)
    };
    for wrong in [
        node("http", json!({})),
        node("http", json!({"url": url, "read-only": false})),
        node("https", json!({"url": url})),
        node("http", json!({"url": "disk.img"})),
        node("http", json!({"url": url, "cookie": "a=b", "cookie-secret": "password"})),
        node("http", json!({"url": url, "timeout": 100_000})),
        node("http", json!({"url": url, "readahead": 1000})),
        node("http", json!({"url": url, "password-secret": "none"})),
        node("http", json!({"url": url, "sslverify": true})),
        node("http", json!({"url": url, "anything": 1})),
    ] {
        let answer = peers.both("blockdev-add", wrong.clone());
        assert!(answer["error"].is_object(), "{wrong}: {answer}");
    }
    for right in [
        node("http", json!({"url": url})),
        node("http", json!({"url": url, "read-only": false, "auto-read-only": true})),
        node("http", json!({"url": url, "readahead": 0, "timeout": 0, "proxy-username": "p"})),
        node("https", json!({"url": nginx.tls_url("/disk.img"), "sslverify": false})),
        node(
            "http",
            json!({"url": nginx.url("/private/disk.img"), "username": "user",
                "password-secret": "password"}),
        ),
    ] {
        peers.execute("blockdev-add", right.clone());
        let [ours, theirs] = peers.sides().map(|side| place(&mut side.qmp, "n"));
        let members = |value: &Value| match value[0].as_str().and_then(|t| t.strip_prefix("json:"))
        {
            Some(text) => serde_json::from_str(text).expect("JSON"),
            None => value[0].clone(),
        };
        assert_eq!(
            (members(&ours), &ours[1], &ours[2], &ours[3]),
            (members(&theirs), &theirs[1], &theirs[2], &theirs[3]),
            "{right}"
        );
        peers.execute("blockdev-del", json!({"node-name": "n"}));
    }
    // QSD would show this.
    let cookie = node("http", json!({"url": url, "cookie": "session=5ec3e7"}));
    peers.ours.qmp.execute("blockdev-add", cookie);
    let nodes = peers.ours.qmp.execute("query-named-block-nodes", json!({}));
    assert!(!nodes.to_string().contains("5ec3e7"), "{nodes}");
    peers.stop();
}

/// A header chooses neither a server nor a file of this host.
#[test]
fn what_the_header_of_an_image_names_is_not_opened() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let scratch = Scratch::new();
    let secret = Image::filled(&scratch, "secret", 1);
    let secret = secret.path().display().to_string();
    let create = |image: PathBuf, backing: &str| {
        let image = image.display().to_string();
        let base = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", backing, &image, "1M"];
        client_output(&scratch, "qemu-img", &base);
        image
    };
    create(web.path("web/names.qcow2"), &secret);
    let here = create(scratch.path("here.qcow2"), &nginx.url("/disk.img"));
    let mut server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let remote = json!({"driver": "http", "url": nginx.url("/names.qcow2")});
    let node = json!({"driver": "qcow2", "node-name": "n", "read-only": true, "file": remote});
    let mut why = |node: &Value| {
        let answer = qmp.ask("blockdev-add", node.clone());
        answer["error"]["desc"].as_str().map(str::to_owned).unwrap_or_else(|| panic!("{answer}"))
    };
    let desc = why(&node);
    assert!(desc.contains("is on a web server, and names"), "{desc}");
    // Neither does a relative name choose another image of that server.
    create(web.path("web/relative.qcow2"), "disk.img");
    let remote = json!({"driver": "http", "url": nginx.url("/relative.qcow2")});
    let relative = integration::merged(node.clone(), &json!({"file": remote}));
    let desc = why(&relative);
    assert!(desc.contains("is on a web server, and names 'disk.img'"), "{desc}");
    let local = json!({"driver": "file", "filename": here});
    let desc = why(&json!({"driver": "qcow2", "node-name": "n", "file": local}));
    assert!(desc.contains("is not a file"), "{desc}");
    // Options may choose.
    qmp.execute("blockdev-add", integration::merged(node, &json!({"backing": null})));
    let base = json!({"driver": "http", "url": nginx.url("/disk.img"), "read-only": true});
    let over = json!({"driver": "qcow2", "node-name": "o", "file": local, "backing": base});
    qmp.execute("blockdev-add", over);
    qmp.execute("quit", json!({}));
    assert!(server.wait().success());
}

/// `serve URL --overlay FILE`: what is written and what was read is in the overlay.
#[test]
fn a_disk_is_served_from_a_url_with_an_overlay() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let scratch = Scratch::new();
    let raw = fs::read(nginx.image()).expect("the image");
    let template = web.path("web/disk.qcow2").display().to_string();
    client_output(
        &scratch,
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", &nginx.image(), &template],
    );
    let serve = |url: String, overlay: Option<&str>| {
        let path = |name: &str| scratch.path(name).display().to_string();
        let command = ServerCommand::other_command(&scratch, "serve").arg(url);
        let mut command = command.arg("--socket").arg(path("disk.sock"));
        if let Some(overlay) = overlay {
            command = command.arg("--overlay").arg(path(overlay));
        }
        command.start()
    };
    let connect = || BlkClient::connect(&scratch.path("disk.sock"), 1, 8).expect("it serves");
    for (name, overlay) in [("disk.qcow2", "one.qcow2"), ("disk.img", "two.qcow2")] {
        let mut server = serve(nginx.url(&format!("/{name}?signature=5ec3e7")), Some(overlay));
        let mut client = connect();
        let sectors = client.config().expect("a configuration").capacity;
        assert_eq!(u64::from(sectors) * 512, raw.len().next_multiple_of(512) as u64);
        assert!(client.read(2048, 4096) == raw[1 << 20..][..4096], "{name}");
        client.write(0, &[9; 512]);
        assert!(client.read(1, 512) == raw[512..1024], "{name}");
        drop(client);
        server.upgrade();
        let mut client = connect();
        assert!(client.read(0, 512) == [9; 512] && client.read(1, 512) == raw[512..1024]);
        drop(client);
        assert!(server.log().contains("an overlay of http://localhost:"), "{}", server.log());
        assert!(!server.log().contains("5ec3e7"), "{}", server.log());
        server.stop();
        // What was read is there, without the server.
        let overlay = scratch.path(overlay).display().to_string();
        let read = format!("read -P {} 1M 1", raw[1 << 20]);
        let image = format!("driver=qcow2,file.driver=file,file.filename={overlay}");
        client_output(&scratch, "qemu-io", &["-r", "-c", &read, "--image-opts", &image]);
        // The overlay is used again.
        let server = serve(nginx.url(&format!("/{name}")), Some(&overlay));
        assert!(connect().read(0, 512) == [9; 512]);
        assert!(server.log().contains("Opened"), "{}", server.log());
        server.stop();
    }
    let server = serve(nginx.url("/disk.img"), None);
    let mut client = connect();
    assert!(client.read(2048, 4096) == raw[1 << 20..][..4096]);
    assert_eq!(client.call(request::OUT, 0, &[1; 512], 0).status, 1, "VIRTIO_BLK_S_IOERR");
    drop(client);
    server.stop();
}

/// `serve` takes the options of the driver, with secrets, and waits for its server as `open-timeout` says.
#[test]
fn serve_has_a_user_and_waits_for_a_server_that_starts_later() {
    let web = Scratch::new();
    let mut nginx = Nginx::new(&web);
    nginx.kill();
    let scratch = Scratch::new();
    let raw = fs::read(nginx.image()).expect("the image");
    fs::write(scratch.path("password"), "pass word").expect("a file");
    let path = |name: &str| scratch.path(name).display().to_string();
    let command = || {
        ServerCommand::other_command(&scratch, "serve")
            .arg(nginx.tls_url("/private/disk.img"))
            .args(["--socket", &path("disk.sock")])
            .args(["--object", &format!("secret,id=password,file={}", path("password"))])
            .args(["--url-opts", "username=user,password-secret=password,open-timeout=600"])
            .env("SSL_CERT_FILE", nginx.authority.display().to_string())
    };
    let (status, log) = command().args(["--url-opts", "open-timeout=0"]).run();
    assert!(!status.success() && log.contains("Could not open"), "{log}");
    let (status, log) = command().args(["--url-opts", "usrname=u"]).run();
    assert!(!status.success() && log.contains("Parameter 'usrname' is unexpected"), "{log}");
    let command = command();
    let waiting = command.spawn();
    eventually("the log of it", || {
        waiting.log().contains("opening waits for up to 600 seconds").then_some(())
    });
    nginx.start();
    let socket = scratch.path("disk.sock");
    let mut client = eventually("the disk", || BlkClient::connect(&socket, 1, 8).ok());
    assert!(client.read(2048, 4096) == raw[1 << 20..][..4096]);
    drop(client);
    waiting.stop();
    let command = ServerCommand::other_command(&scratch, "serve");
    let mut server = command
        .arg(nginx.url("/private/disk.img"))
        .args(["--socket", &path("disk.sock")])
        .args(["--object", &format!("secret,id=password,file={}", path("password"))])
        .args(["--url-opts", "username=user,password-secret=password"])
        .start();
    server.upgrade();
    let mut client = eventually("the disk", || BlkClient::connect(&socket, 1, 8).ok());
    assert!(client.read(2048, 4096) == raw[1 << 20..][..4096]);
    drop(client);
    assert!(!server.log().contains("pass word"), "{}", server.log());
    server.stop();
}
