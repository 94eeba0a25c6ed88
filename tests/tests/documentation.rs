//! Documents generated from the tables of options: the reference, man pages, completions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use integration::{Scratch, daemon, tool};

const GENERATE: &str = "cargo run -p ringmill -- --generate reference > docs/REFERENCE.md";

/// The output of `--generate`.
fn generated(what: &str) -> String {
    let output = run(Command::new(daemon()).args(["--generate", what]));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    output
}

/// A folder that has the program as `name`, for `PATH`.
fn folder_with_program(scratch: &Scratch, name: &str) -> PathBuf {
    let folder = scratch.path("bin");
    fs::create_dir_all(&folder).expect("a new folder");
    std::os::unix::fs::symlink(daemon(), folder.join(name)).expect("a link");
    folder
}

#[test]
fn the_reference_matches_the_tables() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/REFERENCE.md");
    let written = fs::read_to_string(&file).expect("docs/REFERENCE.md");
    let generated = generated("reference");
    let (before, after) = (written.lines(), generated.lines());
    if let Some((old, new)) = before.zip(after).find(|(old, new)| old != new) {
        panic!("docs/REFERENCE.md is old: run\n{GENERATE}\n- {old}\n+ {new}");
    }
    assert_eq!(written.len(), generated.len(), "docs/REFERENCE.md is old: run\n{GENERATE}");
}

#[test]
fn the_reference_describes_each_thing() {
    for line in generated("reference").lines().filter(|line| line.starts_with("| `")) {
        // The last cell of a row is its description.
        let cells: Vec<&str> = line.trim_end_matches(" |").rsplit(" | ").collect();
        assert!(cells.first().is_some_and(|help| help.trim().len() > 3), "{line}");
    }
}

/// groff and mandoc report only the missing date, which would make equal sources generate different pages.
#[test]
fn man_pages_are_well_formed() {
    let scratch = Scratch::new();
    for page in ["man-ringmill", "man-storage-daemon", "man-qmp"] {
        let file = scratch.path(page);
        fs::write(&file, generated(page)).expect("written");
        let output =
            run(Command::new(tool("groff")).args(["-ww", "-man", "-Tutf8", "-z"]).arg(&file));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{page}");
        let lint = Command::new(tool("mandoc")).args(["-Tlint", "-Wall"]).arg(&file).output();
        let said = lint.expect("mandoc runs").stdout;
        let said = String::from_utf8(said).expect("UTF-8");
        // Literal text stays in one line, whatever its length.
        let known = ["missing date", "longer than 80 bytes", "referenced manual not found"];
        let found: Vec<&str> =
            said.lines().filter(|line| !known.iter().any(|known| line.contains(known))).collect();
        assert!(found.is_empty(), "{page}:\n{}", found.join("\n"));
    }
}

/// The completions of a line by a shell, which runs `program`.
fn completed(shell: &str, program: &str, scratch: &Scratch, line: &str) -> Vec<String> {
    let folder = folder_with_program(scratch, "ringmill");
    let path = std::env::var("PATH").expect("a PATH");
    let output = run(Command::new(tool(shell))
        .args(["-c", program])
        .env("PATH", format!("{}:{path}", folder.display()))
        .env("HOME", scratch.path(""))
        .env("LINE", line)
        .env("SCRIPT", scratch.path("script"))
        .current_dir(scratch.path("files")));
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    fs::remove_dir_all(folder).expect("ours");
    said.lines().map(|line| line.trim_end().to_owned()).collect()
}

fn scratch_for(shell: &str) -> Scratch {
    let scratch = Scratch::new();
    fs::write(scratch.path("script"), generated(shell)).expect("written");
    fs::create_dir(scratch.path("files")).expect("a new folder");
    fs::write(scratch.path("files").join("disk.img"), "").expect("written");
    scratch
}

#[test]
fn bash_completes_command_lines() {
    let scratch = scratch_for("complete-bash");
    // As readline calls it: words are cut at = and :, and a completion replaces the last part.
    let program = "source \"$SCRIPT\"; COMP_LINE=$LINE; COMP_POINT=${#LINE}; _ringmill; \
                   printf '%s\\n' \"${COMPREPLY[@]}\"; complete -p ringmill >&2";
    let completed = |line: &str| completed("bash", program, &scratch, line);
    run(Command::new(tool("bash")).arg("-n").arg(scratch.path("script")));
    assert_eq!(completed("ringmill ser"), ["serve"]);
    assert_eq!(
        completed("ringmill serve --cache "),
        ["none", "writeback", "writethrough", "directsync", "unsafe"]
    );
    assert_eq!(completed("ringmill storage-daemon --blockdev fi"), ["file"]);
    // The word for readline begins after the last =.
    assert_eq!(completed("ringmill storage-daemon --blockdev file,filename=d"), ["disk.img"]);
    assert_eq!(
        completed("ringmill storage-daemon --blockdev file,aio=native,cache.di"),
        ["native,cache.direct="]
    );
    let defined = "ringmill storage-daemon --blockdev file,node-name=disk0,filename=disk.img";
    assert_eq!(completed(&format!("{defined} --export nbd,id=e,node-name=")), ["disk0"]);
}

#[test]
fn fish_completes_command_lines() {
    let scratch = scratch_for("complete-fish");
    let completed = |line: &str| -> Vec<String> {
        let program = "source $SCRIPT; complete -C $LINE";
        let lines = completed("fish", program, &scratch, line);
        lines.iter().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect()
    };
    run(Command::new(tool("fish")).arg("-n").arg(scratch.path("script")));
    assert_eq!(completed("ringmill ser"), ["serve"]);
    assert_eq!(completed("ringmill storage-daemon --blockdev raw,off"), ["raw,offset="]);
    assert_eq!(
        completed("ringmill storage-daemon --blockdev file,filename=d"),
        ["file,filename=disk.img"]
    );
}

/// With replacements of zsh's own functions, which draw a menu.
#[test]
fn zsh_completes_command_lines() {
    let scratch = scratch_for("complete-zsh");
    run(Command::new(tool("zsh")).arg("-n").arg(scratch.path("script")));
    let program = "compdef() { : }; source $SCRIPT; \
                   compadd() { print -l -- \"${(@)candidates}\" }; \
                   compset() { }; _files() { print files }; \
                   words=(\"${(@s: :)LINE}\"); CURRENT=${#words}; _ringmill";
    let completed = |line: &str| completed("zsh", program, &scratch, line);
    assert_eq!(completed("ringmill ser"), ["serve"]);
    assert_eq!(completed("ringmill storage-daemon --blockdev raw,off"), ["raw,offset="]);
    assert_eq!(completed("ringmill storage-daemon --blockdev file,filename=d"), ["files"]);
}
