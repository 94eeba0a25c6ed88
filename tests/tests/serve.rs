//! `ringmill serve`: the short way from nothing to a guest with a disk.

use std::fs;
use std::path::Path;

use integration::nbd::client_output;
use integration::{BlkClient, Guest, Image, Scratch, Server, ServerCommand, eventually, request};

/// Serves `image` and waits until it says how to attach it.
fn serve(scratch: &Scratch, image: &Path, arguments: &[&str]) -> (Server, String) {
    let socket = scratch.path("disk.sock");
    let mut command = ServerCommand::other_command(scratch, "serve")
        .on_terminal()
        .arg(image.to_str().expect("a path in UTF-8"))
        .arg("--socket")
        .arg(socket.to_str().expect("a path in UTF-8"));
    for argument in arguments {
        command = command.arg(*argument);
    }
    let server = command.start();
    let text = eventually("the instructions", || {
        Some(server.log()).filter(|text| text.contains("queue_size=128\n"))
    });
    (server, text)
}

/// The options for QEMU in what `serve` prints.
fn qemu_options(text: &str) -> String {
    let options = text.lines().skip_while(|line| !line.starts_with("Attach it to QEMU")).skip(1);
    let options = options.take_while(|line| !line.is_empty());
    options.map(|line| line.trim_end_matches('\\')).collect::<Vec<_>>().join(" ")
}

#[test]
fn from_nothing_to_a_guest_with_a_disk() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.img");
    let (server, text) = serve(&scratch, &image, &["--size", "64M"]);
    assert!(text.contains("disk.img (raw, 64 MiB)\n"), "{text}");
    let options = qemu_options(&text);
    let lines = Guest::new().attached_by(&options).run(
        "cat /sys/block/vda/size
        dd if=/dev/urandom of=/dev/vda bs=1M count=8 conv=fsync 2>/dev/null
        md5sum </dev/vda",
    );
    server.stop();
    let sum = format!("{}  -", Image::existing(&image).md5());
    assert_eq!(lines, ["131072", &sum]);
}

/// The image is closed, and its journal removed, by the control thread: the sandbox lets no I/O thread remove a file.
#[test]
fn a_start_that_fails_late_leaves_no_journal() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let runtime = scratch.path("runtime");
    fs::create_dir(&runtime).unwrap();
    for n in 0..10 {
        let (status, log) = ServerCommand::other_command(&scratch, "serve")
            .env("RUNTIME_DIRECTORY", runtime.to_str().unwrap())
            .args([path(&format!("{n}.qcow2")).as_str(), "--size", "1M"])
            .args(["--socket", path("none/disk.sock").as_str()])
            .run();
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(log.contains("Failed to bind socket"), "{log}");
        assert!(!log.contains("refused system call"), "{log}");
        let left: Vec<_> = fs::read_dir(runtime.join("journals")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}\n{log}");
    }
}

/// What is printed for a controller names the socket, where there is one.
#[test]
fn controllers_are_attached_over_vfio_user() {
    for device in ["nvme", "ahci"] {
        let scratch = Scratch::new();
        let socket = scratch.path("disk.sock");
        let path = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
        let server = ServerCommand::other_command(&scratch, "serve")
            .on_terminal()
            .arg(path(&scratch.path("disk.img")))
            .args(["--size", "1M", "--as", device, "--socket", &path(&socket)])
            .start();
        let text = eventually("the instructions", || {
            Some(server.log()).filter(|text| text.contains("--user-device"))
        });
        let option = text.split("-device '").nth(1).expect("QEMU's option");
        let option = option.split('\'').next().expect("its value");
        let option: serde_json::Value = serde_json::from_str(option).expect("JSON");
        assert_eq!(option["driver"], "vfio-user-pci");
        assert_eq!(option["socket"]["path"], path(&socket));
        assert!(text.contains(&format!("--user-device socket={}\n", socket.display())));
        std::os::unix::net::UnixStream::connect(&socket).expect("the export listens");
        server.stop();
    }
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 1);
    let output = refused(&scratch, image.path(), &["--as", "nvme", "--pin-memory"]);
    assert!(output.contains("--as nvme: memory cannot be pinned"), "{output}");
}

#[test]
fn an_image_that_exists_keeps_its_size_and_contents() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let before = image.md5();
    let (server, text) = serve(&scratch, image.path(), &["--size", "64M"]);
    server.stop();
    assert!(text.contains("disk.img exists and has 1 MiB: --size was ignored\n"), "{text}");
    assert_eq!(image.md5(), before);
}

/// Without a terminal, as in a journal: the image, its format and size, and the socket.
#[test]
fn a_journal_gets_no_instructions() {
    let scratch = Scratch::new();
    create(&scratch, &["-f", "qcow2", "disk.img", "16M"]);
    let path = |name: &str| scratch.path(name).display().to_string();
    for (more, read_only) in [(vec![], ""), (vec!["--read-only"], ", read-only")] {
        let command = ServerCommand::other_command(&scratch, "serve").logging(Some("warn"));
        let command = command.args([&path("disk.img"), "--socket", &path("disk.sock")]);
        let server = more.into_iter().fold(command, ServerCommand::arg).start();
        let expected = format!(
            "Opened {} (qcow2, 16 MiB{read_only})\nServing {} on {}\n",
            path("disk.img"),
            path("disk.img"),
            path("disk.sock")
        );
        eventually("the image and the socket", || server.log().contains("Serving").then_some(()));
        assert_eq!(server.log(), expected);
        server.stop();
    }
}

#[test]
fn no_image_and_no_size() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.img");
    let command = ServerCommand::other_command(&scratch, "serve");
    let (status, output) = command.arg(image.to_str().expect("a path in UTF-8")).run();
    assert_eq!(status.code(), Some(1));
    assert!(output.contains("disk.img") && output.contains("--size"), "{output}");
    assert!(!image.exists());
}

/// Runs `serve` on an image that it refuses. Returns the output.
fn refused(scratch: &Scratch, image: &Path, arguments: &[&str]) -> String {
    let mut command = ServerCommand::other_command(scratch, "serve")
        .arg(image.to_str().expect("a path in UTF-8"));
    for argument in arguments {
        command = command.arg(*argument);
    }
    let (status, output) = command.run();
    assert_eq!(status.code(), Some(1), "{output}");
    output
}

fn create(scratch: &Scratch, arguments: &[&str]) {
    client_output(scratch, "qemu-img", &[&["create", "-q"], arguments].concat());
}

/// Returns the output of `qemu-img info`.
fn info(scratch: &Scratch, image: &str) -> String {
    client_output(scratch, "qemu-img", &["info", image])
}

#[test]
fn a_qcow2_images_contents_are_served() {
    let scratch = Scratch::new();
    create(&scratch, &["-f", "qcow2", "base.qcow2", "16M"]);
    create(&scratch, &["-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2", "disk.img"]);
    let image = scratch.path("disk.img");
    let (mut server, _) = serve(&scratch, &image, &[]);
    for round in 1..=2 {
        let mut client = BlkClient::connect(&scratch.path("disk.sock"), 1, 8).expect("it serves");
        let sectors = client.config().expect("a configuration").capacity;
        assert_eq!(u64::from(sectors) * 512, 16 << 20);
        client.write(round * 8, &[round as u8; 4096]);
        assert_eq!(client.read(8, 4096), [1; 4096]);
        drop(client);
        if round == 1 {
            server.upgrade();
        }
    }
    server.stop();
    let said = info(&scratch, "disk.img");
    assert!(said.contains("file format: qcow2"), "{said}");
    client_output(&scratch, "qemu-img", &["check", "-q", "-f", "qcow2", "disk.img"]);
    client_output(&scratch, "qemu-img", &["convert", "-O", "raw", "disk.img", "flat"]);
    let mut expected = vec![0; 16 << 20];
    expected[4096..8192].fill(1);
    expected[8192..12288].fill(2);
    assert!(fs::read(scratch.path("flat")).expect("it was made") == expected);
}

#[test]
fn a_new_images_format_follows_its_name() {
    let scratch = Scratch::new();
    for (name, options, format) in [
        ("new.qcow2", &[][..], "qcow2"),
        ("new.img", &[], "raw"),
        ("other.img", &["--format", "qcow2"], "qcow2"),
        ("other.qcow2", &["--format", "raw"], "raw"),
    ] {
        let image = scratch.path(name);
        let (server, _) = serve(&scratch, &image, &[&["--size", "1G"], options].concat());
        server.stop();
        let said = info(&scratch, name);
        assert!(said.contains(&format!("file format: {format}\n")), "{name}: {said}");
        assert!(said.contains("virtual size: 1 GiB"), "{name}: {said}");
    }
    for name in ["new.vmdk", "new.vhdx", "new.vhd", "new.vdi", "new.qed", "new.luks"] {
        let image = scratch.path(name);
        let said = refused(&scratch, &image, &["--size", "1G"]);
        assert!(said.contains(".qcow2") && said.contains("--format raw"), "{said}");
        assert!(!image.exists());
    }
}

#[test]
fn images_in_other_formats_are_refused() {
    let scratch = Scratch::new();
    for format in ["vmdk", "vhdx", "vpc", "vdi", "qed", "parallels", "qcow", "luks"] {
        let name = format!("disk.{format}");
        let secret = ["--object", "secret,id=s,data=key", "-o", "key-secret=s,iter-time=10"];
        let options = if format == "luks" { &secret[..] } else { &[] };
        create(&scratch, &[&["-f", format], options, &[&name, "8M"]].concat());
        let image = scratch.path(&name);
        let before = Image::existing(&image).md5();
        let said = refused(&scratch, &image, &[]);
        for expected in [format, "qemu-img convert", "--format raw"] {
            assert!(said.contains(expected), "{expected}: {said}");
        }
        // qemu-img would overwrite a file that is there.
        let taken = image.with_extension("qcow2");
        fs::write(&taken, "precious").expect("a file");
        let again = refused(&scratch, &image, &[]);
        let free = image.with_extension("new.qcow2").display().to_string();
        assert!(said.contains(&taken.display().to_string()) && again.contains(&free), "{again}");
        fs::remove_file(&taken).expect("it is there");
        // The driver `luks` reads such an image.
        let advises_driver = said.contains("--blockdev driver=luks,");
        assert_eq!(advises_driver, format == "luks", "{said}");
        assert_eq!(said.contains("ringmill does not read"), format != "luks", "{said}");
        let said = refused(&scratch, &image, &["--format", "qcow2"]);
        assert!(said.contains("not a qcow2 image") && said.contains(format), "{said}");
        assert_eq!(Image::existing(&image).md5(), before);
        let (server, _) = serve(&scratch, &image, &["--format", "raw"]);
        server.stop();
    }
    create(&scratch, &["-f", "vpc", "-o", "subformat=fixed", "fixed.vhd", "8M"]);
    assert!(refused(&scratch, &scratch.path("fixed.vhd"), &[]).contains("-f vpc"));
}

/// A qcow2 header could name any file of the host as the backing file.
#[test]
fn a_guest_does_not_make_a_qcow2_image_of_its_raw_disk() {
    let scratch = Scratch::new();
    fs::write(scratch.path("secret"), vec![0x55; 1 << 20]).expect("writable");
    let secret = scratch.path("secret");
    let secret = secret.to_str().expect("UTF-8");
    create(&scratch, &["-f", "qcow2", "-F", "raw", "-b", secret, "header"]);
    let header = fs::read(scratch.path("header")).expect("it was made")[..65536].to_vec();
    let write = |server: &mut Server| {
        let mut client = BlkClient::connect(&scratch.path("disk.sock"), 1, 8).expect("it serves");
        let reply = client.call(request::OUT, 0, &header, 0);
        drop(client);
        server.upgrade();
        reply.status
    };
    let image = Image::filled(&scratch, "disk.img", 1);
    let before = image.md5();
    let (mut server, _) = serve(&scratch, image.path(), &[]);
    assert_eq!(write(&mut server), 1, "VIRTIO_BLK_S_IOERR");
    assert_eq!(write(&mut server), 1, "also after an upgrade");
    assert!(server.log().contains("qcow2"), "it is told: {}", server.log());
    server.stop();
    assert_eq!(image.md5(), before);
    // `--format raw` allows such writes, also in the next process.
    let (mut server, _) = serve(&scratch, image.path(), &["--format", "raw"]);
    assert_eq!(write(&mut server), 0);
    let mut client = BlkClient::connect(&scratch.path("disk.sock"), 1, 8).expect("it serves");
    assert_eq!(client.read(0, 4096), header[..4096]);
    drop(client);
    server.stop();
}

#[test]
fn a_raw_node_with_the_header_of_another_format_is_warned_of() {
    let scratch = Scratch::new();
    create(&scratch, &["-f", "vmdk", "disk.vmdk", "8M"]);
    create(&scratch, &["-f", "qcow2", "disk.qcow2", "8M"]);
    let lines = |driver: &str, name: &str| {
        let path = scratch.path(name);
        let node =
            format!("{driver},node-name=n,file.driver=file,file.filename={}", path.display());
        let server = ServerCommand::new(&scratch).arg("--blockdev").arg(node).start();
        let log = server.log();
        server.stop();
        log.lines()
            .filter(|line| line.contains("header of a"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    for format in ["vmdk", "qcow2"] {
        let said = lines("raw", &format!("disk.{format}"));
        assert!(matches!(&*said, [line] if line.contains(format)), "{said:?}");
    }
    assert_eq!(lines("qcow2", "disk.qcow2"), [""; 0]);
    fs::write(scratch.path("disk.img"), [0; 1 << 20]).expect("writable");
    assert_eq!(lines("raw", "disk.img"), [""; 0]);
}

#[test]
fn an_encrypted_image_is_refused_without_options_that_serve_lacks() {
    let scratch = Scratch::new();
    let secret = ["--object", "secret,id=s,data=key"];
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    create(&scratch, &[&secret[..], &["-f", "qcow2", "-o", options, "disk.qcow2", "1M"]].concat());
    let said = refused(&scratch, &scratch.path("disk.qcow2"), &[]);
    assert!(said.contains("ringmill storage-daemon serves it"), "{said}");
    assert!(!said.contains("encrypt.format="), "{said}");
}

/// Advice about an image names options of `serve`.
#[test]
fn advice_names_options_of_serve() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let path = image.path().to_str().expect("a path in UTF-8");
    let (server, _) = serve(&scratch, image.path(), &["--read-only"]);
    let refused = |name: &'static str, wrapper: Option<&str>, arguments: &[&str]| {
        let socket = scratch.path("other.sock");
        let mut command = ServerCommand::other_command(&scratch, "serve").named(name);
        command = command.arg("--socket").arg(socket.to_str().expect("a path in UTF-8"));
        command = arguments.iter().fold(command, |command, word| command.arg(*word));
        let command =
            wrapper.into_iter().fold(command, |command, wrapper| command.wrapped_by(wrapper));
        let (status, output) = command.run();
        assert_eq!(status.code(), Some(1), "{output}");
        output
    };
    for (name, wrapper, arguments, advice) in [
        ("locked", None, [path, "--aio", "threads"], "--read-only may be shared"),
        (
            "ring",
            Some(env!("CARGO_BIN_EXE_deny-io-uring")),
            [path, "--aio", "io_uring"],
            "use --aio threads",
        ),
    ] {
        // Only the case `locked` takes locks.
        let locking: &[&str] = if name == "locked" { &[] } else { &["--locking", "off"] };
        let output = refused(name, wrapper, &[&arguments[..], locking].concat());
        assert!(output.contains(advice), "{output}");
        for option in ["read-only=on", "cache.direct=", "aio=", "locking="] {
            assert!(!output.contains(option), "{output}");
        }
    }
    server.stop();
}

/// Readers do not share an image with its writer.
#[test]
fn a_second_daemon_is_not_told_to_read_what_another_one_writes() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let path = image.path().to_str().expect("a path in UTF-8");
    let (server, _) = serve(&scratch, image.path(), &[]);
    let other = |name: &'static str, options: &[&str]| {
        let command = ServerCommand::other_command(&scratch, "serve").named(name).arg(path);
        let socket = scratch.path(&format!("{name}.sock"));
        let command = command.arg("--socket").arg(socket.to_str().expect("a path in UTF-8"));
        let (status, output) =
            options.iter().fold(command, |command, word| command.arg(*word)).run();
        assert_eq!(status.code(), Some(1), "{output}");
        output
    };
    let output = other("writer", &[]);
    assert!(output.contains("Stop it first.") && !output.contains("--read-only"), "{output}");
    let output = other("reader", &["--read-only"]);
    assert!(output.contains("cannot share. Stop it first."), "{output}");
    server.stop();
}
