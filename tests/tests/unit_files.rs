//! The unit files of `packaging/systemd`, as systemd reads them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use integration::{Scratch, daemon, repository, tool};

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

/// Sockets of exports belong to the group of virtual machine monitors.
#[test]
fn the_folder_of_exports_gives_its_group_to_sockets() {
    let folder = repository().join("packaging/systemd");
    let read = |name: &str| fs::read_to_string(folder.join(name)).expect("a file");
    let made = read("ringmill.tmpfiles");
    assert!(
        made.lines().any(|line| line == "d /run/ringmill/exports 2755 ringmill kvm -"),
        "{made}"
    );
    let service = read("ringmill.service");
    // systemd would give all in it to the service's group.
    assert!(!service.lines().any(|line| line.starts_with("RuntimeDirectory=")), "{service}");
    for line in ["ReadWritePaths=/run/ringmill/exports", "UMask=0007"] {
        assert!(service.lines().any(|found| found == line), "{line} is missing");
    }
    let group = read("ringmill.sysusers");
    assert!(group.lines().any(|line| line == "g kvm -"), "{group}");
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

/// The sources of the Debian package's files, and where each goes.
fn packaged() -> Vec<(String, String)> {
    let manifest = repository().join("crates/ringmill/Cargo.toml");
    let text = fs::read_to_string(manifest).expect("the manifest");
    let (_, assets) = text.split_once("\nassets = [\n").expect("the package's files");
    let (assets, _) = assets.split_once("\n]").expect("the end of the list");
    let asset = |line: &str| {
        let mut quoted = line.split('"').skip(1).step_by(2).map(str::to_owned);
        (quoted.next().expect("a source"), quoted.next().expect("a place"))
    };
    assets.lines().map(asset).collect()
}

#[test]
fn the_debian_package_has_the_units_and_the_pages_they_name() {
    let packaged = packaged();
    for (source, _) in &packaged {
        // The program and generated texts are there once the package is built.
        let generated = ["target/release/", "../../target/"];
        if !generated.iter().any(|start| source.starts_with(start)) {
            let path = repository().join("crates/ringmill").join(source.trim_end_matches("/*"));
            assert!(path.exists(), "{source} does not exist");
        }
    }
    let folder = repository().join("packaging/systemd");
    let mut pages = 0;
    for unit in fs::read_dir(&folder).expect("the units").map(|entry| entry.expect("a file").path())
    {
        let name = unit.file_name().and_then(|name| name.to_str()).expect("UTF-8");
        let is_packaged = |(source, _): &(String, String)| source.ends_with(&format!("/{name}"));
        assert!(packaged.iter().any(is_packaged), "{name} is not in the package");
        let text = fs::read_to_string(&unit).expect("a unit");
        let documentation = text.lines().filter_map(|line| line.strip_prefix("Documentation="));
        for page in documentation.flat_map(|pages| pages.split(' ')) {
            let page = page.strip_prefix("man:").and_then(|page| page.strip_suffix(')'));
            let (name, section) = page.and_then(|page| page.split_once('(')).expect("a man page");
            let source = format!("../../target/package/{name}.{section}");
            let place = format!("usr/share/man/man{section}/");
            assert!(packaged.contains(&(source, place)), "the package has no {name}({section})");
            pages += 1;
        }
    }
    assert!(pages >= 4, "{pages} pages");
}
