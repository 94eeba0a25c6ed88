//! Runs the shell blocks of a Markdown page, in order, in a new folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

use crate::program::{daemon, install, repository, tied_command, tool};
use crate::{Scratch, eventually};

/// A fenced block of a Markdown page.
#[derive(Debug)]
pub struct Block {
    /// The word after the opening fence: `sh` for commands.
    pub language: String,
    /// The lines between the fences.
    pub text: String,
    /// Path of the page and number of the block's first line, for messages.
    pub place: String,
}

/// The folder for one page's blocks. Dropping it kills the daemons whose pid files are in the folder.
#[derive(Debug)]
pub struct Walkthrough {
    scratch: Scratch,
}

/// Replaces cargo: the test has built the program already.
const CARGO: &str = r#"#!/bin/sh
[ "$*" = "build --release --locked -p ringmill" ] || { echo "cargo $*: not what builds ringmill" >&2; exit 1; }
mkdir -p target/release
ln -sf "$RINGMILL" target/release/ringmill
"#;

/// Replaces sudo: absolute paths in arguments are redirected into the folder.
const SUDO: &str = r#"#!/bin/bash
exec "${@/#\//$ROOT/}"
"#;

/// Returns the fenced blocks of a page, by its path in the repository.
///
/// # Panics
///
/// If the page is missing, or a block has no language, as commands could not be distinguished from output.
pub fn blocks(page: &str) -> Vec<Block> {
    let file = repository().join(page);
    let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{page}: {error}"));
    let mut blocks: Vec<Block> = Vec::new();
    let mut is_open = false;
    for (number, line) in (1..).zip(text.lines()) {
        match line.strip_prefix("```") {
            Some(_) if is_open => is_open = false,
            Some(language) => {
                assert!(!language.is_empty(), "{page}:{number}: a block without a language");
                is_open = true;
                let place = format!("{page}:{}", number + 1);
                let language = language.to_owned();
                blocks.push(Block { language, text: String::new(), place });
            }
            None if is_open => {
                let block = blocks.last_mut().expect("a block is open");
                block.text += line;
                block.text.push('\n');
            }
            None => {}
        }
    }
    assert!(!is_open, "{page}: the last block has no end");
    blocks
}

impl Walkthrough {
    /// Makes the folder. `PATH` has `ringmill` and the replacements of cargo and sudo.
    #[expect(clippy::new_without_default, reason = "it is not a value but a folder")]
    pub fn new() -> Self {
        let scratch = Scratch::new();
        for folder in ["bin", "usr/local/bin"] {
            fs::create_dir_all(scratch.path(folder)).expect("a new folder");
        }
        install(&scratch.path("bin/cargo"), CARGO);
        install(&scratch.path("bin/sudo"), SUDO);
        Self { scratch }
    }

    /// Adds the program to `PATH`, for pages without an installation.
    pub fn with_program(self) -> Self {
        let link = self.path("usr/local/bin/ringmill");
        std::os::unix::fs::symlink(daemon(), link).expect("a link");
        self
    }

    /// Returns the path of `name` in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// Returns a command that runs `text` in bash, in the folder. The first command that fails ends it.
    pub fn shell(&self, text: &str) -> Command {
        let mut command = tied_command(&tool("bash"));
        command.args(["-euo", "pipefail", "-c", text]).current_dir(self.scratch.dir());
        let path = std::env::var("PATH").expect("a PATH");
        let own = [self.path("bin"), self.path("usr/local/bin")].map(|p| p.display().to_string());
        command.env("PATH", format!("{}:{path}", own.join(":")));
        command.env("RINGMILL", daemon()).env("ROOT", self.scratch.dir());
        command
    }

    /// Runs a block. Returns what its commands print on standard output.
    ///
    /// # Panics
    ///
    /// If a command fails, with its output.
    pub fn run(&self, block: &Block) -> String {
        // Into files: a daemon that stays in the background would keep a pipe open.
        let [output, errors] = ["output", "errors"].map(|name| self.path(&format!("bin/{name}")));
        let create = |path: &Path| fs::File::create(path).expect("a new file");
        let mut command = self.shell(&block.text);
        let status = command.stdout(create(&output)).stderr(create(&errors)).status();
        let status = status.expect("bash runs");
        let read = |path: &Path| String::from_utf8_lossy(&fs::read(path).expect("a file")).into();
        let (output, errors): (String, String) = (read(&output), read(&errors));
        let Block { text, place, .. } = block;
        assert!(status.success(), "{place}: {status}\n{text}--- output:\n{output}{errors}---");
        output
    }

    /// Waits until a process that is no child of the test has ended.
    pub fn wait_for_end(&self, pid: Pid) {
        // A zombie has a folder in /proc, but no program.
        let program = format!("/proc/{pid}/exe");
        eventually("the daemon's end", || fs::read_link(&program).err().map(|_| ()));
    }

    /// Returns the process ids in the folder's pid files.
    pub fn daemons(&self) -> Vec<Pid> {
        let entries = fs::read_dir(self.scratch.dir()).expect("the folder").filter_map(Result::ok);
        let paths = entries.map(|entry| entry.path());
        let files = paths.filter(|path| path.extension().is_some_and(|end| end == "pid"));
        let pids = files.filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok());
        pids.map(Pid::from_raw).collect()
    }
}

impl Drop for Walkthrough {
    fn drop(&mut self) {
        for pid in self.daemons() {
            // Fails if the daemon has ended.
            let _ = signal::kill(pid, Signal::SIGKILL);
        }
    }
}
