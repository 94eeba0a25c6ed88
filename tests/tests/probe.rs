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
    let ublk = output.lines().find(|line| line.trim_start().starts_with("ublk"));
    let expected = match std::path::Path::new("/dev/ublk-control").exists() {
        true => "yes",
        false => "there is no /dev/ublk-control",
    };
    assert!(ublk.is_some_and(|line| line.contains(expected)), "{output}");
}

/// The probe reports a limit of pinned memory only if the kernel applies it.
#[test]
fn pinned_memory_is_limited_where_the_kernel_says_so() {
    let scratch = Scratch::new();
    let pinned = |wrapper: Option<&str>| {
        let probe = ServerCommand::other_command(&scratch, "probe");
        let probe = wrapper.into_iter().fold(probe, |probe, wrapper| probe.wrapped_by(wrapper));
        let (status, output) = probe.run();
        assert!(status.success(), "{output}");
        let line = output.lines().find(|line| line.contains("pinned memory")).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{output}"))
    };
    // The wrapper sets a limit of 2 MiB, and drops CAP_IPC_LOCK.
    let limited = pinned(Some(env!("CARGO_BIN_EXE_limit-memlock")));
    assert!(limited.contains(" up to 2 MiB for all processes of this user "), "{limited}");
    // The kernel applies no limit to root of the initial user namespace.
    let read = |file| std::fs::read_to_string(file).expect("proc is mounted");
    let is_initial = read("/proc/self/uid_map").split_whitespace().eq(["0", "0", "4294967295"]);
    let status = read("/proc/self/status");
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = u64::from_str_radix(capabilities.expect("a line").trim(), 16).expect("bits");
    let unlimited = is_initial && capabilities & 1 << 14 != 0;
    let here = pinned(None);
    assert_eq!(here.contains("is not applied to io_uring here"), unlimited, "{here}");
}

#[test]
fn without_io_uring() {
    let scratch = Scratch::new();
    let probe = ServerCommand::other_command(&scratch, "probe");
    let (status, output) = probe.wrapped_by(env!("CARGO_BIN_EXE_deny-io-uring")).run();
    assert!(status.success(), "{output}");
    assert!(output.contains("epoll") && output.contains("Operation not permitted"), "{output}");
}
