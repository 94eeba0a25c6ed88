//! The programs that the tests run, and where they are.

use std::env;
use std::fs::File;
use std::io::{Read, Write};
use std::iter;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use nix::fcntl::{Flock, FlockArg};

use crate::Scratch;

/// Returns the top of the repository.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is a folder of the workspace")
}

/// A program that `scripts/setup-tests.sh` installs, by name.
///
/// # Panics
///
/// If it is missing, with a message that names the script.
pub fn tool(name: &str) -> PathBuf {
    let path = env::var("PATH").unwrap_or_default();
    iter::once(repository().join("target/tools"))
        .chain(env::split_paths(&path))
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .unwrap_or_else(|| panic!("{name} is not installed: run scripts/setup-tests.sh"))
}

/// The Python that `scripts/setup-tests.sh` installs clients into.
///
/// # Panics
///
/// If it is missing, with a message that names the script.
pub fn python() -> PathBuf {
    let python = repository().join("target/python/bin/python");
    assert!(python.is_file(), "{} does not exist: run scripts/setup-tests.sh", python.display());
    python
}

/// A client in `tests/clients`, by the name of its file.
pub fn client(name: &str) -> PathBuf {
    repository().join("tests/clients").join(name)
}

/// Builds a library to be loaded before libc, from a source in `tests/clients`. Returns the value for `LD_PRELOAD`.
///
/// # Panics
///
/// If the build fails.
pub fn preloaded(scratch: &Scratch, source: &str) -> String {
    let library = scratch.path(source).with_extension("so");
    let mut cc = Command::new(tool("gcc"));
    cc.args(["-shared", "-fPIC", "-O", "-o"]).arg(&library).arg(client(source));
    assert!(cc.status().expect("gcc runs").success(), "{source} does not build");
    library.to_str().expect("a path in UTF-8").to_owned()
}

/// A file of the guest that `scripts/setup-tests.sh` makes, by name.
///
/// # Panics
///
/// If it is missing, with a message that names the script.
pub(crate) fn guest_file(name: &str) -> PathBuf {
    let file = repository().join("target/guest").join(name);
    assert!(file.is_file(), "{} does not exist: run scripts/setup-tests.sh", file.display());
    file
}

/// Installs `text` as the program at `path`, from a separate process. A file open for writing cannot be executed ("Text
/// file busy"), and children of other tests inherit files open in this process until they execute their programs.
pub fn install(path: &Path, text: &str) {
    let script = r#"printf %s "$2" >"$1" && chmod 755 "$1""#;
    let mut shell = Command::new(tool("sh"));
    shell.args(["-c", script, "sh"]).arg(path).arg(text);
    assert!(shell.status().expect("sh runs").success(), "{} is not written", path.display());
}

/// A command whose process is killed when the thread that started it ends, in whatever way. A killed test leaves no
/// process behind.
pub fn tied_command(program: &Path) -> Command {
    let mut command = Command::new(tool("setpriv"));
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// The daemon under test: `RINGMILL_BIN`, else the workspace's, which is built if necessary.
pub fn daemon() -> &'static Path {
    static DAEMON: OnceLock<PathBuf> = OnceLock::new();
    DAEMON.get_or_init(|| env::var_os("RINGMILL_BIN").map_or_else(build_daemon, PathBuf::from))
}

/// Builds `ringmill` into the folder and the profile of the running test.
///
/// `cargo test` does not build binaries of other packages, and would test an outdated one. With cargo-nextest each test
/// is a process, and the first test of a run builds the daemon. With `RINGMILL_IS_BUILT`, `scripts/test` has built it.
fn build_daemon() -> PathBuf {
    let test = env::current_exe().expect("the path of the running test");
    // <target>/<profile>/deps/<test>
    let profile_dir = test.parent().and_then(Path::parent).expect("a test is in <profile>/deps");
    let profile = if profile_dir.ends_with("release") { "release" } else { "debug" };
    let target_dir = profile_dir.parent().expect("a profile is in the target folder");
    let program = target_dir.join(profile).join("ringmill");
    if env::var_os("RINGMILL_IS_BUILT").is_some() {
        assert!(program.is_file(), "{} does not exist: unset RINGMILL_IS_BUILT", program.display());
        return program;
    }
    let run = env::var("NEXTEST_RUN_ID").unwrap_or_default();
    let built_by = target_dir.join(format!("ringmill-{profile}-built-by"));
    let built_by = File::options().create(true).append(true).read(true).open(built_by);
    let built_by = built_by.expect("the target folder takes files");
    let mut built_by = Flock::lock(built_by, FlockArg::LockExclusive).expect("a lock");
    let mut last_run = String::new();
    built_by.read_to_string(&mut last_run).expect("a text");
    if !run.is_empty() && last_run == run {
        return program;
    }
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package", "ringmill"]).current_dir(repository());
    cargo.arg("--target-dir").arg(target_dir);
    // Cargo's variables for this package would make it rebuild crates that depend on them.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
    if profile == "release" {
        cargo.arg("--release");
    }
    let status = cargo.status().expect("cargo can be run");
    assert!(status.success(), "ringmill does not build");
    built_by.set_len(0).expect("a file");
    built_by.write_all(run.as_bytes()).expect("a file");
    program
}

/// The words of a command line. `~` stands for a blank within a word.
pub fn words(line: &str) -> Vec<String> {
    line.split(' ').map(|word| word.replace('~', " ")).collect()
}
