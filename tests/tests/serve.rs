//! `ringmill serve`: the short way from nothing to a guest with a disk.

use std::path::Path;

use integration::{Guest, Image, Scratch, Server, ServerCommand, eventually};

/// Serves `image` and waits until it says how to attach it.
fn serve(scratch: &Scratch, image: &Path, arguments: &[&str]) -> (Server, String) {
    let socket = scratch.path("disk.sock");
    let mut command = ServerCommand::other_command(scratch, "serve")
        .arg(image.to_str().expect("a path in UTF-8"))
        .arg("--socket")
        .arg(socket.to_str().expect("a path in UTF-8"));
    for argument in arguments {
        command = command.arg(*argument);
    }
    let server = command.spawn();
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

#[test]
fn an_image_that_exists_keeps_its_size_and_contents() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let before = image.md5();
    let (server, _) = serve(&scratch, image.path(), &["--size", "64M"]);
    server.stop();
    assert_eq!(image.md5(), before);
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
