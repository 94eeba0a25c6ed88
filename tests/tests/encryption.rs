//! Encrypted qcow2 images and LUKS disks: made by `qemu-img` and read by the daemon, and the other way round.

use std::os::unix::fs::MetadataExt;

use integration::nbd::client_output;
use integration::{Qmp, Scratch, Server, ServerCommand, eventually, merged};
use serde_json::{Value, json};

/// The image's options for `qemu-img create`.
const ENCRYPT: &str = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=1";

fn path(scratch: &Scratch, name: &str) -> String {
    scratch.path(name).display().to_string()
}

/// The password, as an object.
fn secret() -> [&'static str; 2] {
    ["--object", "secret,id=s,data=letmein"]
}

fn qemu(scratch: &Scratch, program: &str, arguments: &[&str]) -> String {
    let [command, rest @ ..] = arguments else { panic!("no command") };
    let output = match program {
        "qemu-io" => client_output(scratch, program, arguments),
        _ => client_output(scratch, program, &[&[*command][..], &secret(), rest].concat()),
    };
    assert!(!output.contains("failed"), "{output}");
    output
}

/// An encrypted image as `--image-opts` takes it.
fn image(scratch: &Scratch, name: &str) -> String {
    format!("driver=qcow2,encrypt.key-secret=s,file.filename={}", path(scratch, name))
}

/// The same over an encrypted image.
fn chain(scratch: &Scratch) -> String {
    let base = path(scratch, "base.qcow2");
    let below = "backing.driver=qcow2,backing.encrypt.key-secret=s,backing.file.filename";
    format!("{},{below}={base}", image(scratch, "top.qcow2"))
}

fn start(scratch: &Scratch) -> (Server, Qmp) {
    let server = ServerCommand::new(scratch).monitor("qmp").args(secret()).start();
    let qmp = Qmp::connect(&server.socket("qmp"));
    (server, qmp)
}

/// Options of a node of an encrypted image.
fn node(scratch: &Scratch, name: &str) -> Value {
    let file = json!({"driver": "file", "filename": path(scratch, &format!("{name}.qcow2"))});
    let encrypt = json!({"format": "luks", "key-secret": "s"});
    json!({"driver": "qcow2", "node-name": name, "file": file, "encrypt": encrypt})
}

/// Opens the chain, and serves it over NBD.
fn serve(scratch: &Scratch, qmp: &mut Qmp) -> String {
    let mut base = node(scratch, "base");
    base["read-only"] = true.into();
    qmp.execute("blockdev-add", base);
    let mut top = node(scratch, "top");
    top["backing"] = "base".into();
    top["discard"] = "unmap".into();
    // A killed daemon's locks go when the kernel has ended its ring, which may be after the process.
    eventually("the image's lock", || {
        qmp.ask("blockdev-add", top.clone()).get("return").is_some().then_some(())
    });
    let addr = json!({"type": "unix", "data": {"path": path(scratch, "nbd")}});
    qmp.execute("nbd-server-start", json!({"addr": addr}));
    let export = json!({"type": "nbd", "id": "top", "node-name": "top", "writable": true});
    qmp.execute("block-export-add", export);
    format!("nbd+unix:///top?socket={}", path(scratch, "nbd"))
}

fn io(scratch: &Scratch, at: &str, commands: &[&str]) {
    let commands: Vec<&str> = commands.iter().flat_map(|command| ["-c", command]).collect();
    qemu(scratch, "qemu-io", &[&["-f", "raw"][..], &commands, &[at]].concat());
}

/// Compares the chain with what is expected, and checks the image.
fn check(scratch: &Scratch) {
    let model = format!("driver=raw,file.driver=file,file.filename={}", path(scratch, "model"));
    qemu(scratch, "qemu-img", &["compare", "-q", "--image-opts", &model, &chain(scratch)]);
    let top = image(scratch, "top.qcow2");
    qemu(scratch, "qemu-img", &["check", "-q", "--image-opts", &top]);
}

/// An encrypted image over another one, and a plain file with the same contents.
fn make(scratch: &Scratch, options: &str) {
    let options = format!("{ENCRYPT}{options}");
    for (name, size) in [("base.qcow2", "4M"), ("top.qcow2", "8M")] {
        let made = path(scratch, name);
        qemu(scratch, "qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, &made, size]);
    }
    let write = "write -P 7 100000 2000000";
    let base = image(scratch, "base.qcow2");
    let [object, password] = secret();
    let arguments = [object, password, "--image-opts", "-c", write, &base];
    qemu(scratch, "qemu-io", &arguments);
    let model = path(scratch, "model");
    qemu(scratch, "qemu-img", &["create", "-q", "-f", "raw", &model, "8M"]);
    io(scratch, &model, &[write]);
}

#[test]
fn an_encrypted_chain_is_read_and_written_as_by_qemu() {
    let cases = [
        "",
        ",cluster_size=512",
        ",encrypt.cipher-alg=aes-128,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256",
        ",encrypt.hash-alg=sha224,encrypt.cipher-mode=ctr",
        ",encrypt.hash-alg=sha384,encrypt.cipher-mode=ctr,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256",
        ",encrypt.hash-alg=ripemd160,encrypt.cipher-alg=aes-128,encrypt.cipher-mode=ctr,encrypt.ivgen-alg=plain",
    ];
    for options in cases {
        let scratch = Scratch::new();
        make(&scratch, options);
        let (server, mut qmp) = start(&scratch);
        let served = serve(&scratch, &mut qmp);
        // Parts of sectors, buffers of several sizes, copies of what lies behind, zeroes, discards.
        let first = [
            "write -P 1 1000 3001",
            "write -P 2 200704 200704",
            "write -P 3 450000 250000",
            "write -P 4 1M 3M",
            "write -z 1500k 100k",
            "write -z -u 2M 1M",
            "write -P 5 6M 70k",
            "write -P 6 6M 1",
        ];
        let again = ["write -P 8 1234567 12288", "write -P 9 200704 16384", "write -P 10 0 512k"];
        for changes in [&first[..], &again] {
            io(&scratch, &served, changes);
            io(&scratch, &path(&scratch, "model"), changes);
            let model = path(&scratch, "model");
            let compare = ["compare", "-q", "-f", "raw", "-F", "raw", &model, &served];
            qemu(&scratch, "qemu-img", &compare);
        }
        // Larger, then what was not there reads as zeroes.
        // An export keeps its node's size.
        qmp.execute("block-export-del", json!({"id": "top"}));
        assert_eq!(qmp.wait_for("BLOCK_EXPORT_DELETED")["id"], "top");
        qmp.execute("block_resize", json!({"node-name": "top", "size": 9 << 20}));
        let export = json!({"type": "nbd", "id": "top", "node-name": "top", "writable": true});
        qmp.execute("block-export-add", export);
        let model = path(&scratch, "model");
        qemu(&scratch, "qemu-img", &["resize", "-q", "-f", "raw", &model, "9M"]);
        let last = ["write -P 11 8388000 1000"];
        io(&scratch, &served, &last);
        io(&scratch, &model, &last);
        server.stop();
        check(&scratch);
    }
}

#[test]
fn an_encrypted_image_is_described_as_by_qemu() {
    let scratch = Scratch::new();
    make(&scratch, "");
    let top = image(&scratch, "top.qcow2");
    let info = qemu(&scratch, "qemu-img", &["info", "--output=json", "--image-opts", &top]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    let (server, mut qmp) = start(&scratch);
    let mut options = node(&scratch, "top");
    let encrypt = options["encrypt"].take();
    for (wrong, why) in [
        (json!({"format": "luks"}), "Parameter 'encrypt.key-secret' is required for cipher"),
        (json!({"format": "luks", "key-secret": "none"}), "No secret with id 'none'"),
        (json!({"key-secret": "s"}), "Parameter 'encrypt.format' is missing"),
        (json!({"format": "aes"}), "Images encrypted with format 'aes' are not supported"),
    ] {
        options["encrypt"] = wrong;
        assert_eq!(qmp.refused("blockdev-add", options.clone()), why);
    }
    options["encrypt"] = encrypt;
    qmp.execute("blockdev-add", options);
    let nodes = qmp.execute("query-named-block-nodes", json!({}));
    let told = nodes.as_array().into_iter().flatten().find(|node| node["node-name"] == "top");
    let told = told.expect("the node");
    assert_eq!((&told["encrypted"], &told["image"]["encrypted"]), (&json!(true), &json!(true)));
    assert_eq!(told["image"]["format-specific"], info["format-specific"]);
    server.stop();
}

#[test]
fn what_was_answered_survives_a_kill() {
    let scratch = Scratch::new();
    make(&scratch, "");
    let model = path(&scratch, "model");
    for round in 0..3 {
        let (server, mut qmp) = start(&scratch);
        let served = serve(&scratch, &mut qmp);
        let compare = ["compare", "-q", "-f", "raw", "-F", "raw", &model, &served];
        qemu(&scratch, "qemu-img", &compare);
        let changes: Vec<String> = (0..20)
            .map(|n| format!("write -P {} {} 5000", 20 * round + n + 1, (n * 397 + round) * 1000))
            .collect();
        let changes: Vec<&str> = changes.iter().map(String::as_str).collect();
        io(&scratch, &served, &changes);
        io(&scratch, &model, &changes);
        server.kill();
    }
    let (server, mut qmp) = start(&scratch);
    serve(&scratch, &mut qmp);
    server.stop();
    check(&scratch);
}

#[test]
fn a_live_upgrade_keeps_an_encrypted_image() {
    let scratch = Scratch::new();
    make(&scratch, "");
    let model = path(&scratch, "model");
    let (mut server, mut qmp) = start(&scratch);
    let served = serve(&scratch, &mut qmp);
    let changes = ["write -P 1 3M 100k", "write -P 2 12345 6789"];
    io(&scratch, &served, &changes);
    io(&scratch, &model, &changes);
    server.upgrade();
    let changes = ["write -P 3 3100k 100k", "write -P 4 5M 1M"];
    io(&scratch, &served, &changes);
    io(&scratch, &model, &changes);
    server.stop();
    check(&scratch);
}

/// Creates an image, and returns the job's error.
fn create(qmp: &mut Qmp, options: Value) -> Option<String> {
    job(qmp, "blockdev-create", json!({"job-id": "make", "options": options}))
}

/// Runs a job named `make`, and returns its error.
fn job(qmp: &mut Qmp, command: &str, arguments: Value) -> Option<String> {
    qmp.execute(command, arguments);
    let ended = eventually("the job's end", || {
        let jobs = qmp.execute("query-jobs", json!({}));
        (jobs[0]["status"] == "concluded").then(|| jobs[0].clone())
    });
    qmp.execute("job-dismiss", json!({"id": "make"}));
    ended.get("error").map(|error| error.as_str().expect("text").to_owned())
}

#[test]
fn images_that_are_made_here_are_read_by_qemu() {
    let ciphers = [
        json!({}),
        json!({"cipher-alg": "aes-128", "hash-alg": "sha512", "ivgen-alg": "plain"}),
        json!({"cipher-alg": "aes-256", "cipher-mode": "cbc", "ivgen-alg": "essiv", "ivgen-hash-alg": "sha256"}),
        json!({"cipher-alg": "aes-192", "hash-alg": "sha1", "preallocation": "full"}),
        json!({"cipher-mode": "ctr", "hash-alg": "sha224"}),
        json!({"cipher-alg": "aes-128", "cipher-mode": "ctr", "ivgen-alg": "essiv", "hash-alg": "sha384"}),
        json!({"cipher-mode": "ctr", "ivgen-alg": "plain", "hash-alg": "ripemd160"}),
    ];
    for cipher in ciphers {
        let scratch = Scratch::new();
        let (server, mut qmp) = start(&scratch);
        for name in ["disk.luks", "disk.qcow2"] {
            std::fs::write(scratch.path(name), []).expect("writable");
            let file =
                json!({"driver": "file", "node-name": name, "filename": path(&scratch, name)});
            qmp.execute("blockdev-add", file);
        }
        let with = |base: &Value, more: &Value| merged(base.clone(), more);
        let luks = json!({"driver": "luks", "file": "disk.luks", "size": 4 << 20, "iter-time": 10});
        let refused = create(&mut qmp, luks.clone());
        assert_eq!(refused.as_deref(), Some("Parameter 'key-secret' is required for cipher"));
        let luks = with(&luks, &json!({"key-secret": "s"}));
        assert_eq!(create(&mut qmp, with(&luks, &cipher)), None);

        let mut of_qcow2 = cipher.clone();
        of_qcow2.as_object_mut().expect("options").remove("preallocation");
        let encrypt = json!({"format": "luks", "iter-time": 10});
        let encrypt = with(&encrypt, &of_qcow2);
        let qcow2 =
            json!({"driver": "qcow2", "file": "disk.qcow2", "size": 4 << 20, "cluster-size": 4096});
        let refused = create(&mut qmp, with(&qcow2, &json!({"encrypt": encrypt})));
        assert_eq!(
            refused.as_deref(),
            Some("Parameter 'encrypt.key-secret' is required for cipher")
        );
        let encrypt = with(&encrypt, &json!({"key-secret": "s"}));
        assert_eq!(create(&mut qmp, with(&qcow2, &json!({"encrypt": encrypt}))), None);
        server.stop();

        let [object, password] = secret();
        let luks =
            format!("driver=luks,key-secret=s,file.filename={}", path(&scratch, "disk.luks"));
        let qcow2 = image(&scratch, "disk.qcow2");
        for image in [&luks, &qcow2] {
            let commands = ["-c", "write -P 5 1000 100000", "-c", "read -P 5 1000 100000"];
            let arguments = [&[object, password, "--image-opts"][..], &commands, &[image]].concat();
            qemu(&scratch, "qemu-io", &arguments);
            let info =
                qemu(&scratch, "qemu-img", &["info", "--output=json", "--image-opts", image]);
            let info: Value = serde_json::from_str(&info).expect("JSON");
            assert_eq!(info["virtual-size"], 4 << 20);
            let told = &info["format-specific"]["data"];
            let told = if image == &luks { told } else { &told["encrypt"] };
            for (name, value) in of_qcow2.as_object().into_iter().flatten() {
                assert_eq!(told[name], *value, "{name}");
            }
        }
        qemu(&scratch, "qemu-img", &["check", "-q", "--image-opts", &qcow2]);
    }
}

#[test]
fn a_detached_header_is_made_for_qemu_and_cryptsetup() {
    let scratch = Scratch::new();
    let (server, mut qmp) = start(&scratch);
    for name in ["data", "header"] {
        std::fs::write(scratch.path(name), []).expect("writable");
        let file = json!({"driver": "file", "node-name": name, "filename": path(&scratch, name)});
        qmp.execute("blockdev-add", file);
    }
    let luks = |nodes: Value| {
        let mut options =
            json!({"driver": "luks", "size": 4 << 20, "key-secret": "s", "iter-time": 10});
        nodes
            .as_object()
            .into_iter()
            .flatten()
            .for_each(|(name, node)| options[name] = node.clone());
        options
    };
    let refused = create(&mut qmp, luks(json!({})));
    let why = "Either the parameter 'header' or 'file' must be specified";
    assert_eq!(refused.as_deref(), Some(why));
    let refused = create(&mut qmp, luks(json!({"file": "data", "header": "data"})));
    assert_eq!(refused.as_deref(), Some("Parameters 'header' and 'file' name the same node"));
    let full = json!({"file": "data", "header": "header", "preallocation": "full"});
    assert_eq!(create(&mut qmp, luks(full)), None);
    let data = std::fs::metadata(scratch.path("data")).expect("the data");
    assert_eq!((data.len(), data.blocks() * 512 >= 4 << 20), (4 << 20, true));

    // Written here, read by QEMU.
    let disk = json!({"driver": "luks", "node-name": "disk", "file": "data", "header": "header", "key-secret": "s"});
    qmp.execute("blockdev-add", disk.clone());
    let addr = json!({"type": "unix", "data": {"path": path(&scratch, "nbd")}});
    qmp.execute("nbd-server-start", json!({"addr": addr}));
    let export = json!({"type": "nbd", "id": "disk", "node-name": "disk", "writable": true});
    qmp.execute("block-export-add", export);
    let served = format!("nbd+unix:///disk?socket={}", path(&scratch, "nbd"));
    io(&scratch, &served, &["write -P 5 0 100000", "write -P 6 4190000 4304"]);
    server.stop();
    let image = format!(
        "driver=luks,key-secret=s,file.filename={},header.filename={}",
        path(&scratch, "data"),
        path(&scratch, "header")
    );
    let [object, password] = secret();
    let reads = ["-c", "read -P 5 0 100000", "-c", "read -P 6 4190000 4304"];
    let arguments = [&[object, password, "--image-opts"][..], &reads, &[&image]].concat();
    qemu(&scratch, "qemu-io", &arguments);
    let header = path(&scratch, "header");
    let dump = client_output(&scratch, "cryptsetup", &["luksDump", &header]);
    assert!(dump.contains("Payload offset:\t0"), "{dump}");

    // A header alone, as QEMU makes it with a file that is there: the other key makes noise of the data.
    let (server, mut qmp) = start(&scratch);
    let file = json!({"driver": "file", "node-name": "header", "filename": header});
    qmp.execute("blockdev-add", file);
    assert_eq!(create(&mut qmp, luks(json!({"header": "header"}))), None);
    // As a disk it would be overwritten.
    let alone = json!({"driver": "luks", "node-name": "disk", "file": "header", "key-secret": "s"});
    let why = qmp.refused("blockdev-add", alone);
    assert_eq!(why, "LUKS payload is overlapping with the header");
    // QEMU could not open what has such a password.
    qmp.execute("object-add", json!({"qom-type": "secret", "id": "zero", "data": "ge\0heim"}));
    let why = create(&mut qmp, luks(json!({"header": "header", "key-secret": "zero"})));
    assert_eq!(why.as_deref(), Some("Data from secret zero is not valid UTF-8"));
    server.stop();
    let reads = ["-c", "read 0 4M"];
    let arguments = [&[object, password, "--image-opts"][..], &reads, &[&image]].concat();
    qemu(&scratch, "qemu-io", &arguments);
}

/// Images whose passwords are changed: a node's options, the options of a change, and the image as `--image-opts` takes
/// it.
struct Locked {
    node: Value,
    change: fn(Value) -> Value,
    name: &'static str,
    key: &'static str,
}

impl Locked {
    /// Makes the images.
    fn all(scratch: &Scratch) -> [Locked; 2] {
        let (server, mut qmp) = start(scratch);
        for (driver, name) in [("luks", "disk.luks"), ("qcow2", "disk.qcow2")] {
            std::fs::write(scratch.path(name), []).expect("writable");
            let file =
                json!({"driver": "file", "node-name": name, "filename": path(scratch, name)});
            qmp.execute("blockdev-add", file);
            let mut options = json!({"driver": driver, "file": name, "size": 1 << 20});
            match driver {
                "luks" => {
                    options["key-secret"] = "s".into();
                    options["iter-time"] = 10.into();
                }
                _ => {
                    options["encrypt"] =
                        json!({"format": "luks", "key-secret": "s", "iter-time": 10});
                }
            }
            assert_eq!(create(&mut qmp, options), None);
        }
        server.stop();
        let file = |name| json!({"driver": "file", "filename": path(scratch, name)});
        [
            Locked {
                node: json!({"driver": "luks", "node-name": "disk", "key-secret": "s", "file": file("disk.luks")}),
                change: |change| {
                    let mut change = change;
                    change["driver"] = "luks".into();
                    change
                },
                name: "disk.luks",
                key: "key-secret",
            },
            Locked {
                node: json!({"driver": "qcow2", "node-name": "disk", "file": file("disk.qcow2"),
                    "encrypt": {"format": "luks", "key-secret": "s"}}),
                change: |change| {
                    let mut encrypt = change;
                    encrypt["format"] = "luks".into();
                    json!({"driver": "qcow2", "encrypt": encrypt})
                },
                name: "disk.qcow2",
                key: "encrypt.key-secret",
            },
        ]
    }

    fn amend(&self, qmp: &mut Qmp, change: Value) -> Option<String> {
        self.amend_with(qmp, change, false)
    }

    fn amend_with(&self, qmp: &mut Qmp, change: Value, force: bool) -> Option<String> {
        let options = (self.change)(change);
        let arguments =
            json!({"job-id": "make", "node-name": "disk", "options": options, "force": force});
        job(qmp, "x-blockdev-amend", arguments)
    }

    /// Whether QEMU opens the image with a password.
    fn opens(&self, scratch: &Scratch, password: &str) -> bool {
        let driver = self.node["driver"].as_str().expect("text");
        let image =
            format!("driver={driver},{}=s,file.filename={}", self.key, path(scratch, self.name));
        let object = format!("secret,id=s,data={password}");
        let read = ["--object", &object, "--image-opts", "-c", "read -P 7 4096 8192", &image];
        let output = std::process::Command::new("qemu-io").args(read).output().expect("qemu-io");
        let output = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(!output.contains("Pattern verification failed"), "{output}");
        assert!(
            output.contains("8192/8192") || output.contains("Invalid password"),
            "neither read nor refused: {output}"
        );
        output.contains("8192/8192")
    }

    fn slots(qmp: &mut Qmp) -> Vec<bool> {
        let nodes = qmp.execute("query-named-block-nodes", json!({}));
        let node = nodes.as_array().into_iter().flatten().find(|node| node["node-name"] == "disk");
        let data = &node.expect("the node")["image"]["format-specific"]["data"];
        let data = if data["slots"].is_null() { &data["encrypt"] } else { data };
        let slots = data["slots"].as_array().expect("slots");
        slots.iter().map(|slot| slot["active"] == true).collect()
    }
}

#[test]
fn passwords_are_added_and_erased_as_by_qemu() {
    let scratch = Scratch::new();
    for locked in Locked::all(&scratch) {
        let (server, mut qmp) = start(&scratch);
        for (id, data) in [("new", "second"), ("third", "third"), ("wrong", "wrong")] {
            let object = json!({"qom-type": "secret", "id": id, "data": data});
            qmp.execute("object-add", object);
        }
        qmp.execute("blockdev-add", locked.node.clone());
        let addr = json!({"type": "unix", "data": {"path": path(&scratch, "nbd")}});
        qmp.execute("nbd-server-start", json!({"addr": addr}));
        let export = json!({"type": "nbd", "id": "disk", "node-name": "disk", "writable": true});
        qmp.execute("block-export-add", export);
        let served = format!("nbd+unix:///disk?socket={}", path(&scratch, "nbd"));
        io(&scratch, &served, &["write -P 7 4096 8192"]);

        let add = json!({"state": "active", "new-secret": "new", "iter-time": 10});
        assert_eq!(locked.amend(&mut qmp, add.clone()), None);
        assert_eq!(Locked::slots(&mut qmp)[..3], [true, true, false]);
        let third =
            json!({"state": "active", "new-secret": "third", "keyslot": 6, "iter-time": 10});
        assert_eq!(locked.amend(&mut qmp, third.clone()), None);
        let with = |name: &str, value: Value| {
            let mut add = add.clone();
            add[name] = value;
            add
        };
        // The texts are those of qemu-storage-daemon 11.1.3.
        for (change, why) in [
            (third.clone(), "Refusing to overwrite active keyslot 6 - please erase it first"),
            (with("keyslot", json!(8)), "Invalid keyslot 8 specified, must be between 0 and 7"),
            (with("new-secret", json!("none")), "No secret with id 'none'"),
            (
                with("old-secret", json!("s")),
                "'old-secret' must not be given when activating keyslots",
            ),
            (with("secret", json!("wrong")), "Invalid password, cannot unlock any keyslot"),
            (json!({"state": "active"}), "'new-secret' is required to activate a keyslot"),
            (
                with("state", json!("inactive")),
                "'new-secret' must not be given when erasing keyslots",
            ),
            (
                json!({"state": "inactive"}),
                "To erase keyslot(s), either explicit keyslot index or the password currently contained in them must be given",
            ),
            (
                json!({"state": "inactive", "keyslot": 4}),
                "Given keyslot 4 is already erased (inactive) ",
            ),
            (
                json!({"state": "inactive", "old-secret": "wrong"}),
                "No keyslots match given (old) password for erase operation",
            ),
            (
                json!({"state": "inactive", "keyslot": 6, "old-secret": "new"}),
                "Given keyslot 6 doesn't contain the given old password for erase operation",
            ),
            (
                json!({"state": "inactive", "keyslot": 6, "iter-time": 10}),
                "'iter-time' must not be given when erasing keyslots",
            ),
            (
                json!({"state": "inactive", "keyslot": 6, "secret": "s"}),
                "'secret' must not be given when erasing keyslots",
            ),
        ] {
            assert_eq!(locked.amend(&mut qmp, change).as_deref(), Some(why));
        }
        // Replaced, with a password of the image other than the node's.
        let mut replace = third.clone();
        replace["new-secret"] = "new".into();
        replace["secret"] = "third".into();
        assert_eq!(locked.amend_with(&mut qmp, replace, true), None);
        // Both slots.
        let first = json!({"state": "inactive", "old-secret": "s"});
        assert_eq!(locked.amend(&mut qmp, first), None);
        assert_eq!(Locked::slots(&mut qmp), [false, true, false, false, false, false, true, false]);
        // The node's own password is not one of the image any more.
        let why = "Invalid password, cannot unlock any keyslot";
        assert_eq!(locked.amend(&mut qmp, add.clone()).as_deref(), Some(why));
        let last = locked.amend(&mut qmp, json!({"state": "inactive", "old-secret": "new"}));
        assert!(last.is_some_and(|why| why.ends_with("irreversibly - refusing operation")));
        assert_eq!(locked.amend(&mut qmp, json!({"state": "inactive", "keyslot": 6})), None);
        let last = locked.amend(&mut qmp, json!({"state": "inactive", "keyslot": 1}));
        assert!(
            last.is_some_and(|why| why.starts_with("Attempt to erase the only active keyslot 1"))
        );
        io(&scratch, &served, &["read -P 7 4096 8192"]);
        server.stop();
        assert!(locked.opens(&scratch, "second"));
        assert!(!locked.opens(&scratch, "letmein"));
        assert!(!locked.opens(&scratch, "third"));

        if locked.name != "disk.luks" {
            // One of QEMU's slow changes is enough.
            continue;
        }
        // What QEMU has changed is opened here.
        let image = path(&scratch, locked.name);
        let driver = locked.node["driver"].as_str().expect("text");
        let prefix = locked.key.strip_suffix("key-secret").expect("a prefix");
        let change = format!("{prefix}state=active,{prefix}new-secret=n,{prefix}iter-time=10");
        let opened = format!("driver={driver},{}=o,file.filename={image}", locked.key);
        let (old, new) = ("secret,id=o,data=second", "secret,id=n,data=letmein");
        let amend =
            ["amend", "--object", old, "--object", new, "-o", &change, "--image-opts", &opened];
        client_output(&scratch, "qemu-img", &amend);
        let (server, mut qmp) = start(&scratch);
        qmp.execute("blockdev-add", locked.node.clone());
        assert_eq!(Locked::slots(&mut qmp)[..3], [true, true, false]);
        // Without any password, the data is lost: with force only.
        let all = [
            json!({"state": "inactive", "keyslot": 1}),
            json!({"state": "inactive", "keyslot": 0}),
        ];
        for change in all {
            assert_eq!(locked.amend_with(&mut qmp, change, true), None);
        }
        server.stop();
        assert!(!locked.opens(&scratch, "letmein"));
    }
}

#[test]
fn what_cannot_be_amended_is_refused() {
    let scratch = Scratch::new();
    let [locked, _] = Locked::all(&scratch);
    let (server, mut qmp) = start(&scratch);
    let plain = path(&scratch, "plain.qcow2");
    qemu(&scratch, "qemu-img", &["create", "-q", "-f", "qcow2", &plain, "1M"]);
    let file = json!({"driver": "file", "filename": plain});
    qmp.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "plain", "file": file}));
    let luks = json!({"driver": "luks", "state": "active", "new-secret": "s", "iter-time": 10});
    let amend = |node: &str, options: &Value| json!({"job-id": "make", "node-name": node, "options": options});
    let mut refused = |node: &str, options: &Value, why: &str| {
        assert_eq!(qmp.refused("x-blockdev-amend", amend(node, options)), why);
    };
    refused("none", &luks, "Cannot find device='' nor node-name='none'");
    let why = "x-blockdev-amend doesn't support changing the block driver";
    refused("plain", &luks, why);
    let why = "Driver does not support x-blockdev-amend";
    refused("plain", &json!({"driver": "file"}), why);
    refused("plain", &json!({"driver": "luks"}), "Parameter 'options.state' is missing");
    let why = "Parameter 'options.encrypt.state' is missing";
    refused("plain", &json!({"driver": "qcow2", "encrypt": {"format": "luks"}}), why);
    let encrypt = json!({"format": "luks", "state": "active", "new-secret": "s"});
    let encrypted = json!({"driver": "qcow2", "encrypt": encrypt});
    let why = job(&mut qmp, "x-blockdev-amend", amend("plain", &encrypted));
    assert_eq!(why.as_deref(), Some("image is not encrypted, can't amend"));
    assert_eq!(
        job(&mut qmp, "x-blockdev-amend", amend("plain", &json!({"driver": "qcow2"}))),
        None
    );
    for (option, why) in
        [("read-only", "Block node is read-only"), ("active", "Node 'disk' is inactive")]
    {
        let mut node = locked.node.clone();
        node[option] = (option == "read-only").into();
        qmp.execute("blockdev-add", node);
        let told = qmp.refused("x-blockdev-amend", amend("disk", &luks));
        assert!(told.starts_with(why), "{told}");
        qmp.execute("blockdev-del", json!({"node-name": "disk"}));
    }
    // The node stays while its passwords change.
    qmp.execute("blockdev-add", locked.node.clone());
    let slow = json!({"driver": "luks", "state": "active", "new-secret": "s", "iter-time": 300});
    qmp.execute("x-blockdev-amend", amend("disk", &slow));
    let told = qmp.refused("blockdev-del", json!({"node-name": "disk"}));
    assert!(told.contains("amend"), "{told}");
    server.stop();
}
