//! Encrypted qcow2 images and LUKS disks: made by `qemu-img` and read by the daemon, and the other way round.

use integration::nbd::client_output;
use integration::{Qmp, Scratch, Server, ServerCommand, eventually};
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
    qmp.execute("blockdev-create", json!({"job-id": "make", "options": options}));
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
        let with = |base: &Value, more: &Value| {
            let mut all = base.clone();
            let members = more.as_object().into_iter().flatten();
            members.for_each(|(name, value)| all[name] = value.clone());
            all
        };
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
