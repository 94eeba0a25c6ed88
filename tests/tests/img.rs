//! `ringmill img`: the same command lines beside qemu-img, which is the oracle.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use integration::{Scratch, daemon, tool};

/// Two folders with the same files: one for the command under test, the other for qemu-img.
struct Pair {
    _scratch: Scratch,
    ours: PathBuf,
    theirs: PathBuf,
    /// The program under test, by the name of the other one.
    program: PathBuf,
}

/// What a run has left: exit code, output and errors.
type Ran = (Option<i32>, String, String);

impl Pair {
    fn new() -> Pair {
        let scratch = Scratch::new();
        let [ours, theirs, bin] = ["ours", "theirs", "bin"].map(|name| scratch.path(name));
        [&ours, &theirs, &bin].iter().for_each(|folder| fs::create_dir(folder).expect("a folder"));
        let program = bin.join("qemu-img");
        symlink(daemon(), &program).expect("a link");
        Pair { _scratch: scratch, ours, theirs, program }
    }

    /// Both folders are the same one: for commands that only read.
    fn of_one_folder() -> Pair {
        let pair = Pair::new();
        Pair { theirs: pair.ours.clone(), ..pair }
    }

    fn ours(&self, arguments: &[&str]) -> Ran {
        ran(&self.program, &self.ours, arguments)
    }

    fn theirs(&self, arguments: &[&str]) -> Ran {
        ran(&tool("qemu-img"), &self.theirs, arguments)
    }

    /// Makes images by qemu-img, the same in both folders.
    fn prepare(&self, commands: &[&str]) {
        for command in commands {
            let (program, arguments) = command.split_once(' ').expect("a program");
            let arguments: Vec<_> =
                arguments.split(' ').map(|word| word.replace('~', " ")).collect();
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let (code, output, errors) = ran(&tool(program), &self.theirs, &arguments);
            assert_eq!(code, Some(0), "{command}: {output}{errors}");
        }
        if self.ours == self.theirs {
            return;
        }
        for entry in fs::read_dir(&self.theirs).expect("the folder is there") {
            let path = entry.expect("an entry").path();
            let copy = [path.as_os_str(), self.ours.as_os_str()];
            assert!(Command::new("cp").args(copy).status().expect("cp runs").success());
        }
    }

    /// Runs a command in both folders. Exit code and output have to be the same, and errors in their first line.
    fn same(&self, arguments: &[&str]) -> String {
        let (ours, theirs) = (self.ours(arguments), self.theirs(arguments));
        let first = |text: &str| text.lines().next().unwrap_or_default().to_owned();
        assert_eq!((ours.0, &ours.1), (theirs.0, &theirs.1), "{arguments:?}: {}", ours.2);
        assert_eq!(first(&ours.2), first(&theirs.2), "{arguments:?}");
        ours.1
    }

    /// The same for words without blanks.
    fn same_words(&self, line: &str) -> String {
        self.same(&line.split(' ').collect::<Vec<_>>())
    }
}

fn ran(program: &Path, folder: &Path, arguments: &[&str]) -> Ran {
    let run = Command::new(program).args(arguments).current_dir(folder).env("TZ", "UTC").output();
    let Output { status, stdout, stderr } = run.expect("the program runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (status.code(), text(stdout), text(stderr))
}

/// A secret, and the options of an image that is encrypted with it.
const SECRET: &str = "--object secret,id=s,data=abc";

#[test]
fn info_is_that_of_qemu_img() {
    let pair = Pair::of_one_folder();
    let encrypted = format!("qemu-img create -q {SECRET} -f");
    pair.prepare(&[
        "qemu-img create -q -f qcow2 base.qcow2 1G",
        "qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2",
        "qemu-img create -q -f qcow2 -o compat=0.10 old.qcow2 1M",
        "qemu-img create -q -f qcow2 -o data_file=data.raw,data_file_raw=on split.qcow2 1M",
        "qemu-img create -q -f raw plain.raw 10M",
        &format!("{encrypted} luks -o key-secret=s,iter-time=10 disk.luks 1M"),
        &format!(
            "{encrypted} qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 secret.qcow2 1M"
        ),
        "qemu-img snapshot -c before base.qcow2",
        "qemu-img snapshot -c top top.qcow2",
        "qemu-img bitmap --add base.qcow2 writes",
    ]);
    for image in [
        "base.qcow2",
        "top.qcow2",
        "old.qcow2",
        "split.qcow2",
        "plain.raw",
        "disk.luks",
        "secret.qcow2",
    ] {
        for options in [&[] as &[&str], &["--output=json"], &["--backing-chain"], &["-U"]] {
            let text = pair.same(&[&["info"], options, &[image]].concat());
            assert!(text.contains("virtual"), "{text}");
        }
    }
    pair.same_words("info --image-opts driver=luks,file.filename=disk.luks");
    pair.same_words("info --image-opts file.filename=top.qcow2 --output=json");
    pair.same_words("info -f raw base.qcow2");
    pair.same(&["info", r#"json:{"driver":"file","filename":"base.qcow2"}"#]);
    pair.same(&["info", "-b", "--output", "json", "top.qcow2"]);
}

#[test]
fn errors_of_info_are_those_of_qemu_img() {
    let pair = Pair::of_one_folder();
    pair.prepare(&[
        "qemu-img create -q -f raw plain.raw 1M",
        "qemu-img create -q -u -f qcow2 -b none.qcow2 -F qcow2 top.qcow2 1M",
    ]);
    for line in [
        "info",
        "info none",
        "info plain.raw top.qcow2",
        "info -f qcow2 plain.raw",
        "info -b top.qcow2",
        "info foo:bar",
        "info nbd://127.0.0.1:1/x",
        "frob",
    ] {
        pair.same_words(line);
    }
    for line in ["info -x plain.raw", "info --output=xml plain.raw", "info -f foo plain.raw"] {
        let (code, _, errors) = pair.ours(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(code, Some(1), "{line}: {errors}");
    }
}

/// What a header names is not opened unless the user asks for the chain: the files are not there. Then a header names a
/// file, whatever the name looks like.
#[test]
fn info_opens_no_file_that_a_header_names() {
    let pair = Pair::of_one_folder();
    pair.prepare(&[
        "qemu-img create -q -u -f qcow2 -b none.qcow2 -F qcow2 top.qcow2 1M",
        "qemu-img create -q -u -f qcow2 -b json:{} -F raw odd.qcow2 1M",
        "qemu-img create -q -f qcow2 -o data_file=data.raw split.qcow2 1M",
    ]);
    fs::remove_file(pair.ours.join("data.raw")).expect("it was made");
    for image in ["top.qcow2", "odd.qcow2", "split.qcow2"] {
        let (code, _, errors) = pair.ours(&["info", image]);
        assert_eq!((code, errors.as_str()), (Some(0), ""), "{image}");
    }
    let (code, _, errors) = pair.ours(&["info", "-b", "odd.qcow2"]);
    assert!(code == Some(1) && errors.contains("No such file"), "{errors}");
}

#[test]
fn created_images_are_those_of_qemu_img() {
    let lines = [
        "create x 1M",
        "create x 3",
        "create -q -f raw -o preallocation=full x 1M",
        "create -f qcow2 x 1G",
        "create -f qcow2 -o size=3 x",
        "create -f qcow2 -b base.qcow2 -F qcow2 x",
        "create -f qcow2 -u -b none.qcow2 -F qcow2 x 1M",
        "create -f qcow2 -o cluster_size=4k,lazy_refcounts=on -o refcount_bits=1 x 1M",
        "create -f qcow2 -o compat=0.10 x 1M",
        "create -f qcow2 -o extended_l2=on,compression_type=zstd x 1M",
        "create -f qcow2 -o data_file=df,data_file_raw=on,preallocation=metadata x 1M",
        "create -f qcow2 file:x 1.5k",
        "create --object secret,id=s,data=abc -f luks -o key-secret=s,iter-time=10 x 1M",
        "create --object secret,id=s,data=abc -f qcow2 -o \
         encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 x 1M",
    ];
    for line in lines {
        let pair = Pair::new();
        pair.prepare(&["qemu-img create -q -f qcow2 base.qcow2 64M"]);
        pair.same_words(line);
        let told = |folder: &Path| {
            let (_, text, errors) = ran(&tool("qemu-img"), folder, &["info", "x"]);
            // Keys differ, and how the ends of files are filled up.
            let varies = ["uuid", "iters", "disk size", "file length"];
            let lines = text.lines().filter(|line| !varies.iter().any(|word| line.contains(word)));
            (lines.collect::<Vec<_>>().join("\n"), errors)
        };
        assert_eq!(told(&pair.ours), told(&pair.theirs), "{line}");
        let is_openable = !line.contains("none.qcow2") && !line.contains("encrypt");
        if line.contains("-f qcow2") && is_openable {
            let (code, text, _) = ran(&tool("qemu-img"), &pair.ours, &["check", "x"]);
            assert_eq!(code, Some(0), "{line}: {text}");
        }
    }
}

#[test]
fn errors_of_create_are_those_of_qemu_img() {
    for line in [
        "create",
        "create x",
        "create x 1Q",
        "create -f foo x 1M",
        "create -f qcow2 -o foo=3 x 1M",
        "create -f qcow2 -o cluster_size=3k x 1M",
        "create -f qcow2 -o lazy_refcounts=maybe x 1M",
        "create -f qcow2 -b base.qcow2 x",
        "create -f qcow2 -b none.qcow2 x",
        "create -f qcow2 -b x -F qcow2 x 1M",
        "create -b base.qcow2 x 1M",
        "create -f qcow2 /none/x 1M",
        "create -f qcow2 x 9E",
    ] {
        let pair = Pair::new();
        pair.prepare(&["qemu-img create -q -f qcow2 base.qcow2 64M"]);
        pair.same_words(line);
        assert!(!pair.ours.join("x").exists(), "{line}");
    }
}
