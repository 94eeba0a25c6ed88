//! The guide's commands run as written. `documents.rs` checks its links.

use std::fs;
use std::path::{Path, PathBuf};

use integration::walkthrough::{Walkthrough, blocks};
use integration::{can_mount, repository};

/// The folder of the chapters.
const FOLDER: &str = "docs/guide/src";
/// Maximum lines of a chapter.
const LONGEST: usize = 300;

/// Runs a chapter's commands, in order, in a new folder.
fn walk_through(chapter: &str) {
    if chapter == "fuse" && !can_mount() {
        return;
    }
    let walk = Walkthrough::new().with_program();
    let mut runs = 0;
    for block in blocks(&format!("{FOLDER}/{chapter}.md")) {
        match block.language.as_str() {
            "sh" => {
                walk.run(&block);
                runs += 1;
            }
            // Commands that need a guest, root or systemd are shown with a prompt.
            "console" => assert!(block.text.starts_with(['$', '#']), "{}", block.place),
            "text" | "yaml" | "toml" | "xml" | "rust" => {}
            other => panic!("{}: {other} is neither commands nor output", block.place),
        }
    }
    assert!(runs > 0, "{chapter} has no commands");
}

macro_rules! chapters {
    ($($test:ident: $chapter:literal;)*) => {
        $(#[test] fn $test() { walk_through($chapter); })*

        /// The chapters with commands that run.
        const WALKED: &[&str] = &[$($chapter),*];
    };
}

chapters! {
    serving_a_disk: "serving";
    an_image_as_a_file: "fuse";
    which_controller: "vfio-user";
    coming_from_qsd: "from-qsd";
    several_disks_and_threads: "disks-and-threads";
    snapshots_mirrors_backups: "snapshots";
    upgrades_and_kills: "upgrade";
    monitoring: "monitoring";
    tls: "tls";
    images_from_the_network: "network-images";
    images: "images";
    sandbox: "sandbox";
    tuning: "tuning";
    install_and_run_as_a_service: "install";
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn markdown_in(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(repository().join(folder)).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "md")).collect()
}

#[test]
fn each_chapter_is_listed_once_is_short_and_runs() {
    let folder = repository().join(FOLDER);
    let summary = read(&folder.join("SUMMARY.md"));
    for path in markdown_in(FOLDER) {
        let name = path.file_stem().and_then(|name| name.to_str()).expect("UTF-8");
        if name == "SUMMARY" {
            continue;
        }
        assert_eq!(summary.matches(&format!("({name}.md)")).count(), 1, "{name} in SUMMARY.md");
        let text = read(&path);
        assert!(text.lines().count() <= LONGEST, "{name} is longer than {LONGEST} lines");
        let has_commands = text.contains("\n```sh\n");
        assert_eq!(WALKED.contains(&name), has_commands, "{name}: a test runs its commands");
    }
}
