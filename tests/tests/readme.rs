//! Runs all commands of the README, in order, with a guest on the first disk and a client on the disk of the recipes.

use std::fs::{self, File};
use std::process::Child;

use integration::walkthrough::{Block, Walkthrough, blocks};
use integration::{BlkClient, Guest, eventually, repository};
use nix::pty::openpty;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

const PAGE: &str = "README.md";

/// Commands of the README that the walk-through runs specially.
const SERVE: &str = "ringmill serve disk.img --size 1G\n";
const TEST: &str = "scripts/test\n";

/// Runs `ringmill serve` as written, runs a guest with the printed options, and ends the command by Ctrl-C.
fn serve_a_guest(walk: &Walkthrough, said: &Block) {
    let log = walk.path("serve.log");
    let mut command = walk.shell(&format!("exec {SERVE}"));
    // With a terminal, `serve` prints how to attach the disk.
    let terminal = openpty(None, None).expect("a terminal");
    command.stdout(File::create(&log).expect("a file")).stderr(terminal.slave);
    let server = command.spawn().expect("bash runs");
    let mut server = Ended(server);
    let printed = || fs::read_to_string(&log).expect("a file");
    let shown = said.text.replace("/home/me", walk.path("").to_str().expect("UTF-8"));
    let shown = shown.replace("//", "/");
    eventually("what the README shows", || {
        (printed().trim_end() == shown.trim_end()).then_some(())
    });
    let options = shown.lines().skip_while(|line| !line.starts_with("Attach it to QEMU")).skip(1);
    let options = options.take_while(|line| !line.is_empty());
    let options: Vec<_> = options.map(|line| line.trim_end_matches('\\')).collect();
    let lines = Guest::new().attached_by(&options.join(" ")).run(
        "cat /sys/block/vda/size
        dd if=/dev/urandom of=/dev/vda bs=1M count=8 conv=fsync 2>/dev/null
        head -c 8388608 /dev/vda | md5sum",
    );
    signal::kill(Pid::from_raw(server.0.id().cast_signed()), Signal::SIGINT).expect("it runs");
    assert!(server.0.wait().expect("our child").success());
    let sum = walk.shell("head -c 8388608 disk.img | md5sum").output().expect("bash runs").stdout;
    let sum = String::from_utf8(sum).expect("UTF-8");
    assert_eq!(lines, ["2097152", sum.trim_end()]);
}

/// A child that is killed when it is dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A client of the recipes' disk. It writes after each block of commands, and reads back all that it has written.
struct Client {
    client: BlkClient,
    rounds: u8,
}

impl Client {
    fn use_disk(&mut self) {
        self.rounds += 1;
        self.client.write(u64::from(self.rounds) * 8, &[self.rounds; 4096]);
        for round in 1..=self.rounds {
            assert_eq!(self.client.read(u64::from(round) * 8, 4096), [round; 4096]);
        }
    }

    fn sectors(&self) -> u64 {
        self.client.config().expect("a configuration").capacity.into()
    }
}

/// Checks what a recipe promises, in addition to the success of its commands.
fn check(walk: &Walkthrough, block: &Block, output: &str, client: Option<&Client>) {
    let has = |command: &str| block.text.contains(command);
    if has("query-block-exports") {
        for shown in
            ["export0  vhost-user-blk", "0 on io0", "1 on io1", "\nringmill_export_requests_total{"]
        {
            assert!(output.contains(shown), "{shown}: {output}");
        }
    }
    if has("iops-total") {
        let ask = "ringmill ctl qmp.sock qom-get path=/objects/group0 property=limits";
        let limits = walk.shell(ask).output().expect("bash runs").stdout;
        let limits = String::from_utf8(limits).expect("UTF-8");
        let is_there = |name: &str, value: &str| {
            limits.lines().any(|line| line.split_whitespace().eq([name, value]))
        };
        assert!(is_there("iops-total", "500") && is_there("bps-total", "52428800"), "{limits}");
    }
    if has("backup.qcow2") {
        let rounds = client.expect("the disk is in use").rounds;
        let status = walk.shell("qemu-img convert -O raw backup.qcow2 backup.raw").status();
        assert!(status.expect("bash runs").success());
        let copy = fs::read(walk.path("backup.raw")).expect("the copy of the copy");
        for round in 1..=rounds {
            let at = usize::from(round) * 4096;
            assert_eq!(copy[at..at + 4096], [round; 4096], "{}: write {round}", block.place);
        }
    }
    if has("block_resize") {
        assert_eq!(client.expect("the disk is in use").sectors(), 4 << 20);
        let moved = fs::metadata(walk.path("disk1.img")).expect("the new image").len();
        assert_eq!(moved, 2 << 30);
    }
}

#[test]
fn its_commands_run_in_order_under_a_guest_and_a_client() {
    let walk = Walkthrough::new();
    let blocks = blocks(PAGE);
    let mut client: Option<Client> = None;
    let mut done = [false; 3];
    for (index, block) in blocks.iter().enumerate() {
        match block.language.as_str() {
            "sh" => {}
            "text" => continue,
            other => panic!("{}: neither commands nor output: {other}", block.place),
        }
        if block.text == SERVE {
            serve_a_guest(&walk, &blocks[index + 1]);
            done[0] = true;
            continue;
        }
        if block.text == TEST {
            // Running the block would run this test.
            let ci = fs::read_to_string(repository().join(".ci/run")).expect("what CI runs");
            assert!(ci.lines().any(|line| line.ends_with(TEST.trim_end())), "CI runs {TEST}");
            done[1] = true;
            continue;
        }
        let before = walk.daemons();
        let output = walk.run(block);
        check(&walk, block, &output, client.as_ref());
        if block.text.contains("ctl qmp.sock quit") {
            drop(client.take());
            before.into_iter().for_each(|pid| walk.wait_for_end(pid));
            assert!(!walk.path("disk0.sock").exists(), "the daemon removes its socket");
            done[2] = true;
        } else if client.is_some() || walk.path("disk0.sock").exists() {
            let connect = || Client {
                client: BlkClient::connect(&walk.path("disk0.sock"), 4, 8).expect("it serves"),
                rounds: 0,
            };
            client.get_or_insert_with(connect).use_disk();
        }
    }
    assert_eq!(done, [true; 3], "the first disk, the test command, the end");
}
