//! `ringmill img` on images of strangers: what its process may do, and that it ends with its reader.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};

use integration::{Scratch, daemon};

fn started(scratch: &Scratch, line: &str) -> Child {
    Command::new(daemon())
        .arg("img")
        .args(line.split(' '))
        .current_dir(scratch.path("."))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program runs")
}

/// Asserts that a process has a filter of system calls, can gain no rights, and has none but that to open files.
fn assert_confined(mut process: Child, what: &str) {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).expect("it runs");
    process.kill().expect("it can be killed");
    process.wait().expect("it ends");
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.expect("the kernel tells").trim().to_owned()
    };
    assert_eq!((&*of("Seccomp:"), &*of("NoNewPrivs:")), ("2", "1"), "{what}");
    // CAP_DAC_OVERRIDE is number 1.
    let rights = u64::from_str_radix(&of("CapEff:"), 16).expect("a number");
    assert_eq!(rights & !2, 0, "{what}");
}

#[test]
fn commands_are_confined_before_they_open_an_image() {
    let scratch = Scratch::new();
    // A server that never answers.
    let server = UnixListener::bind(scratch.path("server")).expect("a socket");
    for line in [
        "info URL",
        "map URL",
        "measure -O raw URL",
        "compare URL URL",
        "convert -O raw URL new",
        "convert -n -O raw missing URL",
        "dd if=URL of=new",
        "resize -f raw URL 1M",
        "snapshot -l URL",
        "snapshot -c one URL",
        "bitmap --add URL writes",
        "commit URL",
        "rebase -b new -F raw URL",
        "create -f qcow2 -b URL -F raw new",
    ] {
        fs::write(scratch.path("missing"), [0; 512]).expect("writable");
        let process = started(&scratch, &line.replace("URL", "nbd+unix:///?socket=server"));
        let _connection = server.accept().expect("the command connects");
        assert_confined(process, line);
    }
}

/// An image of 64 KiB clusters whose L1 entries all lead to one L2 table: the list of its parts has 512 million lines.
fn endless(entries: u32) -> Vec<u8> {
    const CLUSTER: u64 = 1 << 16;
    let size = u64::from(entries) * CLUSTER / 8 * CLUSTER;
    let mut image = vec![0; 5 * CLUSTER as usize];
    let mut put = |at: u64, bytes: &[u8]| {
        image[at as usize..][..bytes.len()].copy_from_slice(bytes);
    };
    let (refcounts, block, l2, l1) = (CLUSTER, 2 * CLUSTER, 3 * CLUSTER, 4 * CLUSTER);
    put(0, b"QFI\xfb\0\0\0\x03");
    put(20, &16_u32.to_be_bytes());
    put(24, &size.to_be_bytes());
    put(36, &entries.to_be_bytes());
    put(40, &l1.to_be_bytes());
    put(48, &refcounts.to_be_bytes());
    put(56, &1_u32.to_be_bytes());
    put(96, &4_u32.to_be_bytes());
    put(100, &104_u32.to_be_bytes());
    put(refcounts, &block.to_be_bytes());
    let copied = 1_u64 << 63;
    (0..CLUSTER / 8).for_each(|n| put(l2 + 8 * n, &(copied | CLUSTER).to_be_bytes()));
    (0..u64::from(entries)).for_each(|n| put(l1 + 8 * n, &(copied | l2).to_be_bytes()));
    image
}

#[test]
fn a_list_of_parts_is_confined_and_ends_with_its_reader() {
    let scratch = Scratch::new();
    fs::write(scratch.path("endless.qcow2"), endless(8192)).expect("writable");
    for format in ["human", "json"] {
        let line = format!("map --output={format} endless.qcow2");
        let mut process = started(&scratch, &line);
        let mut out = process.stdout.take().expect("a pipe");
        out.read_exact(&mut [0]).expect("a first line");
        drop(out);
        assert_eq!(process.wait().expect("it ends").code(), Some(0), "{format}");
    }
    // A pipe that is full keeps the command where it is.
    let mut process = started(&scratch, "map endless.qcow2");
    let mut out = process.stdout.take().expect("a pipe");
    out.read_exact(&mut [0]).expect("a first line");
    assert_confined(process, "map");
}

#[test]
fn a_check_is_confined() {
    let scratch = Scratch::new();
    let mut image = endless(1);
    // All clusters of the file are counted. No L1 entry leads to them.
    image[2 << 16..3 << 16].chunks_mut(2).for_each(|count| count.copy_from_slice(&[0, 1]));
    image[4 << 16..5 << 16].fill(0);
    let path = scratch.path("leaks.qcow2");
    fs::write(&path, image).expect("writable");
    let file = fs::File::options().write(true).open(&path).expect("it is there");
    file.set_len(2 << 30).expect("a sparse file");
    for line in ["check leaks.qcow2", "check -r leaks leaks.qcow2"] {
        let mut process = started(&scratch, line);
        let mut errors = process.stderr.take().expect("a pipe");
        // The list of leaks is longer than the pipe.
        errors.read_exact(&mut [0]).expect("a first line");
        assert_confined(process, line);
    }
}
