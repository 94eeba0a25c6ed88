//! `ringmill probe`: what the machine offers, and what ringmill makes of it.

use integration::{Image, Scratch, ServerCommand};

#[test]
fn this_machine() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let probe = ServerCommand::other_command(&scratch, "probe");
    let (status, output) = probe.arg(image.path().to_str().expect("a path in UTF-8")).run();
    assert!(status.success(), "{output}");
    assert!(output.contains("io_uring") && output.contains("O_DIRECT"), "{output}");
}

#[test]
fn without_io_uring() {
    let scratch = Scratch::new();
    let probe = ServerCommand::other_command(&scratch, "probe");
    let (status, output) = probe.wrapped_by(env!("CARGO_BIN_EXE_deny-io-uring")).run();
    assert!(status.success(), "{output}");
    assert!(output.contains("epoll") && output.contains("Operation not permitted"), "{output}");
}
