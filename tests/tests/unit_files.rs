//! The unit files of `packaging/systemd`, as systemd reads them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use integration::{Scratch, daemon, tool};

const UNITS: [&str; 4] =
    ["ringmill.service", "ringmill.socket", "ringmill@.service", "ringmill@.socket"];

/// Copies of the units, for a program that is there.
fn units(scratch: &Scratch) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    let program = daemon().to_str().expect("a path in UTF-8");
    for unit in UNITS {
        let text = fs::read_to_string(folder.join(unit)).expect("a unit file");
        let text = text.replace("/usr/bin/ringmill", program);
        fs::write(scratch.path(unit), text).expect("a copy");
    }
}

fn systemd_analyze(scratch: &Scratch, arguments: &[&str], unit: &str) -> (Output, String) {
    let mut command = Command::new(tool("systemd-analyze"));
    // Beside the system's own.
    let path = format!("{}:", scratch.dir().display());
    command.env("SYSTEMD_UNIT_PATH", path).args(arguments).arg(scratch.path(unit));
    let output = command.output().expect("it can be run");
    let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    (output, text)
}

#[test]
fn systemd_has_nothing_to_say_against_them() {
    let scratch = Scratch::new();
    units(&scratch);
    for unit in UNITS {
        let arguments = ["verify", "--man=no", "--recursive-errors=no"];
        let (output, text) = systemd_analyze(&scratch, &arguments, unit);
        assert!(output.status.success() && text.is_empty(), "{unit}: {text}");
    }
    // It would have, if there were something.
    let path = scratch.path("ringmill.service");
    let text = fs::read_to_string(&path).expect("the copy");
    fs::write(&path, text.replace("PrivateTmp=", "PrivateTemp=")).expect("a copy");
    let (_, text) = systemd_analyze(&scratch, &["verify", "--man=no"], "ringmill.service");
    assert!(text.contains("PrivateTemp"), "{text}");
}

/// Exposure goes from 0 to 100 here, in tenths of what is shown.
#[test]
fn little_is_exposed() {
    let scratch = Scratch::new();
    units(&scratch);
    for (unit, most) in [("ringmill@.service", 6), ("ringmill.service", 15)] {
        let threshold = format!("--threshold={most}");
        let arguments = ["security", "--offline=yes", "--no-pager", &threshold];
        let (output, text) = systemd_analyze(&scratch, &arguments, unit);
        let score = text.lines().find(|line| line.contains("Overall exposure level"));
        println!("{unit}: {}", score.expect("a score").trim());
        assert!(output.status.success(), "{unit}: {text}");
    }
}

/// The command line of each service names the paths of its sockets.
#[test]
fn a_service_asks_for_its_sockets() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    for unit in ["ringmill", "ringmill@"] {
        let read = |kind: &str| {
            let path: PathBuf = folder.join(format!("{unit}.{kind}"));
            fs::read_to_string(path).expect("a unit file")
        };
        let (service, socket) = (read("service"), read("socket"));
        let paths = socket.lines().filter_map(|line| line.strip_prefix("ListenStream="));
        let paths: Vec<&str> = paths.collect();
        // One for programs, one for people.
        assert_eq!(paths.len(), if unit == "ringmill" { 2 } else { 1 }, "{socket}");
        let command = service.split_once("ExecStart=").expect("a command").1;
        let command = command.split("\nRestart=").next().expect("its end");
        for path in paths {
            assert!(command.contains(path), "{unit}: {path}: {command}");
        }
    }
}

/// `Documentation=` names man pages that `--generate` prints.
#[test]
fn man_pages_exist() {
    let titles = ["man-ringmill", "man-storage-daemon", "man-qmp"].map(|page| {
        let output = Command::new(daemon()).args(["--generate", page]).output().expect("it runs");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let mut words = text.strip_prefix(".TH ").expect("a title").split(' ');
        let mut word = || words.next().expect("a name and a section").to_lowercase();
        format!("man:{}({})", word(), word())
    });
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    for unit in UNITS {
        let text = fs::read_to_string(folder.join(unit)).expect("a unit file");
        let pages = text.lines().find_map(|line| line.strip_prefix("Documentation="));
        for page in pages.expect("documentation").split(' ') {
            assert!(titles.contains(&page.to_owned()), "{unit}: {page} is none of {titles:?}");
        }
    }
}
