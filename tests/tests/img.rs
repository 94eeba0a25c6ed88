//! `ringmill img`: the same command lines beside qemu-img, which is the oracle.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use integration::{Scratch, daemon, tool, words};

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
            let words = words(command);
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let (code, output, errors) = ran(&tool(words[0]), &self.theirs, &words[1..]);
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
        // How far a command is, is told as often as it likes.
        let end = |text: &str| text.rsplit('\r').next().unwrap_or_default().to_owned();
        let ended = (theirs.0, end(&theirs.1));
        assert_eq!((ours.0, end(&ours.1)), ended, "{arguments:?}: {}", ours.2);
        assert_eq!(ours.1.contains("(100.00/100%)\r"), theirs.1.contains("(100.00/100%)\r"));
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

/// Writes of a pattern in different places, with gaps and zeroes.
const WRITES: [&str; 5] = [
    "qemu-io -c write~-P~1~0~128k src.qcow2",
    "qemu-io -c write~-P~2~1M~64k src.qcow2",
    "qemu-io -c write~-z~2M~64k src.qcow2",
    "qemu-io -c write~-P~3~7340033~511 src.qcow2",
    "qemu-io -c write~-P~4~16752640~24k src.qcow2",
];

/// A source of 16 MiB with some data.
fn with_source() -> Pair {
    let pair = Pair::new();
    pair.prepare(&[&["qemu-img create -q -f qcow2 src.qcow2 16M"][..], &WRITES].concat());
    pair
}

impl Pair {
    /// Whether two images of the command under test have the same contents, as qemu-img sees it.
    fn assert_equal(&self, one: &str, other: &str, options: &[&str]) {
        let arguments = [&["compare", "-q"], options, &[one, other]].concat();
        let (code, output, errors) = ran(&tool("qemu-img"), &self.ours, &arguments);
        assert_eq!(code, Some(0), "{one} {other}: {output}{errors}");
    }
}

#[test]
fn conversions_have_the_contents_of_the_source() {
    for (options, image) in [
        ("-O raw", "x"),
        ("-O qcow2", "x"),
        ("-O qcow2 -W -m 16 -t none", "x"),
        ("-O qcow2 -o cluster_size=4k,compat=0.10", "x"),
        ("-O qcow2 -o extended_l2=on", "x"),
        ("-c -O qcow2", "x"),
        ("-c -O qcow2 -o compression_type=zstd,cluster_size=2M", "x"),
        ("-O qcow2 -o preallocation=metadata", "x"),
        ("-S 0 -O raw", "x"),
        ("-S 64k -O qcow2", "x"),
        ("-p -f qcow2 -O qcow2 -o data_file=x.data", "x"),
    ] {
        let pair = with_source();
        let line = format!("convert {options} src.qcow2 {image}");
        pair.same_words(&line);
        pair.assert_equal("src.qcow2", image, &[]);
        if options.contains("qcow2") {
            let (code, text, _) = ran(&tool("qemu-img"), &pair.ours, &["check", "-q", "x"]);
            assert_eq!(code, Some(0), "{options}: {text}");
        }
    }
}

/// Holes of the source take no space in the target, and runs of zeroes neither.
#[test]
fn conversions_are_as_sparse_as_by_qemu_img() {
    use std::os::unix::fs::MetadataExt;
    let pair = Pair::new();
    pair.prepare(&[
        "qemu-img create -q -f raw src.raw 64M",
        "qemu-io -f raw -c write~-P~0~0~32M -c write~-P~5~40M~1M src.raw",
    ]);
    for (options, image) in
        [("-O raw", "x.raw"), ("-O qcow2", "x.qcow2"), ("-S 0 -O raw", "full.raw")]
    {
        pair.same_words(&format!("convert -f raw {options} src.raw {image}"));
        pair.assert_equal("src.raw", image, &["-f", "raw"]);
        let blocks = |folder: &Path| {
            let metadata = fs::metadata(folder.join(image)).expect("it was made");
            metadata.blocks() * 512
        };
        let (ours, theirs) = (blocks(&pair.ours), blocks(&pair.theirs));
        assert!(ours <= theirs + (1 << 20), "{image}: {ours} bytes, and {theirs} by qemu-img");
        let is_full = ours >= 64 << 20;
        assert_eq!(is_full, image == "full.raw", "{ours}");
    }
}

#[test]
fn conversions_of_chains_encrypted_images_and_onto_images_are_right() {
    let pair = with_source();
    pair.prepare(&[
        "qemu-img create -q -f qcow2 -b src.qcow2 -F qcow2 top.qcow2 20M",
        "qemu-io -c write~-P~9~64k~64k -c write~-P~8~18M~1M top.qcow2",
        "qemu-img create -q -f raw there.raw 20M",
        "qemu-io -f raw -c write~-P~7~0~20M there.raw",
    ]);
    pair.same_words("convert -O raw top.qcow2 flat.raw");
    pair.assert_equal("top.qcow2", "flat.raw", &[]);
    pair.same_words("convert -O qcow2 -B src.qcow2 -F qcow2 top.qcow2 thin.qcow2");
    pair.assert_equal("top.qcow2", "thin.qcow2", &[]);
    let (_, text, _) = pair.ours(&["info", "thin.qcow2"]);
    assert!(text.contains("backing file: src.qcow2"), "{text}");
    // What was there is overwritten by holes, too.
    pair.same_words("convert -n -O raw top.qcow2 there.raw");
    pair.assert_equal("top.qcow2", "there.raw", &[]);
    // Sources are put one after the other.
    pair.same_words("convert -O qcow2 src.qcow2 top.qcow2 both.qcow2");
    let theirs = ran(
        &tool("qemu-img"),
        &pair.ours,
        &["convert", "-O", "raw", "src.qcow2", "top.qcow2", "both.raw"],
    );
    assert_eq!(theirs.0, Some(0));
    pair.assert_equal("both.qcow2", "both.raw", &[]);
    let secret = "convert --object secret,id=s,data=abc -O";
    let luks = "luks -o key-secret=s,iter-time=10 src.qcow2 x.luks";
    assert_eq!(pair.ours(&format!("{secret} {luks}").split(' ').collect::<Vec<_>>()).0, Some(0));
    let options = ["--object", "secret,id=s,data=abc", "--image-opts"];
    let names =
        ["driver=luks,key-secret=s,file.filename=x.luks", "driver=qcow2,file.filename=src.qcow2"];
    let arguments = [&["compare"], &options[..], &names].concat();
    let (code, text, errors) = ran(&tool("qemu-img"), &pair.ours, &arguments);
    assert_eq!(code, Some(0), "{text}{errors}");
}

/// The header of an encrypted overlay names its backing file, zeroes are stored where a new image does not read as zeroes, and
/// where the target's backing file would show through.
#[test]
fn encrypted_overlays_and_sources_without_a_backing_file_keep_their_contents() {
    let pair = with_source();
    let (secret, encrypt) =
        ("--object secret,id=s,data=abc", "encrypt.format=luks,encrypt.key-secret=s");
    let created = format!("qemu-img create -q {secret} -f qcow2 -o {encrypt},encrypt.iter-time=10");
    pair.prepare(&[
        &format!("{created} -b src.qcow2 -F qcow2 top.qcow2"),
        "qemu-img create -q -f qcow2 flat.qcow2 16M",
        "qemu-io -c write~-P~2~0~1M flat.qcow2",
        "qemu-img convert -O raw src.qcow2 contents.raw",
        "qemu-img convert -O raw flat.qcow2 flat.raw",
    ]);
    let works = |line: String| {
        let (code, text, errors) = pair.ours(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(code, Some(0), "{line}: {text}{errors}");
    };
    let encrypted = |name: &str| format!("driver=qcow2,{encrypt},file.filename={name}");
    let assert_encrypted = |name: &str, raw: &str| {
        let raw = format!("driver=raw,file.filename={raw}");
        let line = format!("compare {secret} --image-opts {} {raw}", encrypted(name));
        let ran = ran(&tool("qemu-img"), &pair.ours, &line.split(' ').collect::<Vec<_>>());
        assert_eq!(ran.0, Some(0), "{ran:?}");
    };
    works(format!("commit {secret} --image-opts {}", encrypted("top.qcow2")));
    works(format!("rebase {secret} --image-opts -b  {}", encrypted("top.qcow2")));
    assert_encrypted("top.qcow2", "contents.raw");
    for preallocation in ["metadata", "falloc"] {
        let options = format!("{encrypt},encrypt.iter-time=10,preallocation={preallocation}");
        works(format!(
            "convert {secret} -f raw -O qcow2 -o {options} flat.raw {preallocation}.qcow2"
        ));
        assert_encrypted(&format!("{preallocation}.qcow2"), "flat.raw");
    }
    works("convert -O qcow2 -B src.qcow2 -F qcow2 flat.qcow2 above.qcow2".to_owned());
    pair.assert_equal("above.qcow2", "flat.raw", &[]);
}

#[test]
fn errors_of_other_commands_are_those_of_qemu_img() {
    let pair = with_source();
    pair.prepare(&["qemu-img create -q -f raw plain.raw 1M"]);
    for line in [
        "convert src.qcow2",
        "convert none x",
        "convert -O foo src.qcow2 x",
        "convert -c -O raw src.qcow2 x",
        "convert -n -O raw src.qcow2 none",
        "convert -O qcow2 -o cluster_size=3k src.qcow2 x",
        "convert -O qcow2 src.qcow2 /none/x",
        "convert -l none src.qcow2 x",
        "convert -l snapshot.name=none src.qcow2 x",
        "convert -f raw -l none src.qcow2 x",
        "convert -l none src.qcow2 src.qcow2 x",
        "convert --bitmaps src.qcow2 x",
        "convert --bitmaps -f raw -O qcow2 src.qcow2 x",
        "convert --bitmaps -O qcow2 src.qcow2 src.qcow2 x",
        "convert --skip-broken-bitmaps -O qcow2 src.qcow2 x",
        "resize src.qcow2",
        "resize src.qcow2 1M",
        "resize src.qcow2 -1G",
        "compare src.qcow2 none",
        "compare src.qcow2",
        "measure",
        "measure -O qcow2 -o cluster_size=3k --size 1G",
        "check none",
        "check plain.raw",
        "snapshot -d none src.qcow2",
        "snapshot -a none src.qcow2",
        "snapshot -f raw -a none src.qcow2",
        "snapshot -c a -d b src.qcow2",
        "commit src.qcow2",
        "rebase src.qcow2",
        "bitmap src.qcow2 b",
        "bitmap --remove src.qcow2 b",
        "dd if=src.qcow2",
    ] {
        let arguments: Vec<_> = line.split(' ').collect();
        let (ours, theirs) = (pair.ours(&arguments), pair.theirs(&arguments));
        assert_eq!((ours.0, &ours.1), (theirs.0, &theirs.1), "{line}: {}", ours.2);
        let error =
            theirs.2.lines().find(|line| line.starts_with("qemu-img: ")).unwrap_or_default();
        let error = error.trim_end_matches('.');
        assert!(ours.2.contains(error), "{line}: {} is not {}", ours.2, theirs.2);
        assert!(!pair.ours.join("x").exists(), "{line}");
    }
}

/// A conversion that is killed leaves no file that could be taken for an image, and the source as it was.
#[test]
fn a_killed_conversion_leaves_nothing() {
    let pair = Pair::new();
    pair.prepare(&[
        "qemu-img create -q -f raw src.raw 256M",
        "qemu-io -f raw -c write~-P~5~0~256M src.raw",
    ]);
    let before = fs::metadata(pair.ours.join("src.raw")).and_then(|file| file.modified());
    let arguments = ["convert", "-p", "-c", "-f", "raw", "-O", "qcow2", "src.raw", "x.qcow2"];
    let mut child = Command::new(&pair.program)
        .args(arguments)
        .current_dir(&pair.ours)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the program runs");
    // It is under way once it has told of progress.
    let mut out = child.stdout.take().expect("a pipe");
    let mut told = String::new();
    while told.matches('%').count() < 3 {
        let mut bytes = [0; 64];
        let len = std::io::Read::read(&mut out, &mut bytes).expect("a text");
        assert!(len > 0, "it has ended: {told}");
        told += &String::from_utf8_lossy(&bytes[..len]);
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let names: Vec<_> = fs::read_dir(&pair.ours).expect("the folder").flatten().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    let after = fs::metadata(pair.ours.join("src.raw")).and_then(|file| file.modified());
    assert_eq!(before.expect("a time"), after.expect("a time"));
    // The same, to its end.
    assert_eq!(pair.ours(&arguments).0, Some(0));
    pair.assert_equal("src.raw", "x.qcow2", &["-f", "raw"]);
}

#[test]
fn images_are_mapped_measured_compared_and_checked_as_by_qemu_img() {
    let pair = Pair::of_one_folder();
    pair.prepare(&[&["qemu-img create -q -f qcow2 src.qcow2 16M"][..], &WRITES].concat());
    pair.prepare(&[
        "qemu-img convert -O raw src.qcow2 same.raw",
        "cp src.qcow2 other.qcow2",
        "qemu-io -c write~-P~6~5M~1k other.qcow2",
        "qemu-img create -q -f qcow2 -b src.qcow2 -F qcow2 longer.qcow2 17M",
        "qemu-img bitmap --add other.qcow2 writes",
        "qemu-img convert -c -O qcow2 src.qcow2 packed.qcow2",
        "qemu-img convert -O qcow2 -o data_file=data.raw src.qcow2 split.qcow2",
    ]);
    for line in [
        "map src.qcow2",
        "map --output=json src.qcow2",
        "map longer.qcow2",
        "map --output=json longer.qcow2",
        "map --output=json --start-offset=32k --max-length=1M longer.qcow2",
        "map same.raw",
        "map --output json same.raw",
        "map packed.qcow2",
        "map --output=json packed.qcow2",
        "map --output=json split.qcow2",
        "measure --size 1G",
        "measure -O qcow2 --size 1G",
        "measure -O qcow2 --size 3T -o cluster_size=4k,refcount_bits=64",
        "measure -O qcow2 -o extended_l2=on --size 10G",
        "measure -O qcow2 src.qcow2",
        "measure -O qcow2 other.qcow2",
        "measure -O qcow2 --output=json other.qcow2",
        "measure -O qcow2 same.raw",
        "measure -O raw src.qcow2",
        "measure --output json src.qcow2",
        "compare src.qcow2 same.raw",
        "compare -s src.qcow2 same.raw",
        "compare src.qcow2 longer.qcow2",
        "compare -s src.qcow2 longer.qcow2",
        "compare src.qcow2 other.qcow2",
        "compare other.qcow2 same.raw",
        "compare -q src.qcow2 other.qcow2",
        "check src.qcow2",
        "check --output=json src.qcow2",
        "check -q src.qcow2",
        "check -f qcow2 -r all src.qcow2",
    ] {
        pair.same_words(line);
    }
}

#[test]
fn sizes_snapshots_and_bitmaps_change_as_by_qemu_img() {
    let pair = with_source();
    pair.prepare(&["qemu-img create -q -f raw plain.raw 1M"]);
    for line in [
        "resize -f raw plain.raw 3M",
        "resize -f raw --shrink plain.raw -1M",
        "resize -q src.qcow2 +8M",
        "resize --shrink src.qcow2 20M",
        "snapshot -c one src.qcow2",
        "snapshot -c two src.qcow2",
        "snapshot -d one src.qcow2",
        "bitmap --add -g 32k src.qcow2 a",
        "bitmap --add --disable src.qcow2 b",
        "bitmap --merge a --clear --enable src.qcow2 b",
        "bitmap --remove src.qcow2 a",
        "check src.qcow2",
    ] {
        let told = |text: String| {
            let lines = text.lines().filter(|line| !line.contains("Image end offset"));
            lines.collect::<Vec<_>>().join("\n")
        };
        let arguments: Vec<_> = line.split(' ').collect();
        let (ours, theirs) = (pair.ours(&arguments), pair.theirs(&arguments));
        assert_eq!((ours.0, told(ours.1)), (theirs.0, told(theirs.1)), "{line}: {}", ours.2);
    }
    let told = |folder: &Path, image: &str| {
        let (_, text, _) = ran(&tool("qemu-img"), folder, &["info", image]);
        // The clock of a snapshot's virtual machine is that of the host, as in QSD.
        let varies = ["disk size", "file length", "two "];
        let lines = text.lines().filter(|line| !varies.iter().any(|word| line.contains(word)));
        lines.collect::<Vec<_>>().join("\n")
    };
    for image in ["src.qcow2", "plain.raw"] {
        assert_eq!(told(&pair.ours, image), told(&pair.theirs, image));
    }
    let (_, list, _) = pair.ours(&["snapshot", "-l", "src.qcow2"]);
    assert!(
        list.starts_with("Snapshot list:\nID") && list.contains("two") && !list.contains("one "),
        "{list}"
    );
}

/// An image with two snapshots, of other sizes and contents than the disk.
fn with_snapshots() -> Pair {
    let pair = Pair::new();
    pair.prepare(&[
        "qemu-img create -q -f qcow2 -o cluster_size=4k src.qcow2 8M",
        "qemu-io -c write~-P~1~0~3M -c write~-z~4M~1M src.qcow2",
        "qemu-img snapshot -c 2 src.qcow2",
        "qemu-img resize -q src.qcow2 12M",
        "qemu-io -c write~-P~2~1M~10M -c discard~0~64k src.qcow2",
        "qemu-img snapshot -c second src.qcow2",
        "qemu-img resize -q --shrink src.qcow2 6M",
        "qemu-io -c write~-P~3~2M~1M src.qcow2",
    ]);
    pair
}

#[test]
fn a_snapshot_is_converted_as_by_qemu_img() {
    let pair = with_snapshots();
    // The second snapshot's id is the first one's name: an id comes first.
    for (line, size) in [
        ("convert -O raw -l second src.qcow2 out.raw", 12 << 20),
        ("convert -O raw -l 2 src.qcow2 out.raw", 12 << 20),
        ("convert -O raw -l snapshot.name=2 src.qcow2 out.raw", 8 << 20),
        ("convert -O raw -l snapshot.id=1,snapshot.name=2 src.qcow2 out.raw", 8 << 20),
    ] {
        pair.same_words(line);
        let of = |folder: &Path| fs::read(folder.join("out.raw")).unwrap();
        let (ours, theirs) = (of(&pair.ours), of(&pair.theirs));
        // qemu-img cuts the disk of then off where that of now ends.
        assert_eq!(ours.len(), size, "{line}");
        assert!(ours[..theirs.len()] == theirs, "{line}");
    }
}

#[test]
fn an_image_goes_back_to_a_snapshot_as_by_qemu_img() {
    let pair = with_snapshots();
    for line in
        ["snapshot -a second src.qcow2", "snapshot -a 1 src.qcow2", "snapshot -a 2 src.qcow2"]
    {
        pair.same_words(line);
        pair.theirs(&["convert", "-O", "raw", "src.qcow2", "out.raw"]);
        let expected = pair.theirs.join("out.raw").display().to_string();
        pair.assert_equal("src.qcow2", &expected, &[]);
        // The snapshots are what they were, and nothing is counted wrong.
        let ours = pair.ours.join("src.qcow2").display().to_string();
        for check in [&["check", "-q", &ours] as &[&str], &["compare", "-q", &ours, "src.qcow2"]] {
            let (code, _, errors) = pair.theirs(check);
            assert_eq!(code, Some(0), "{line}: {check:?}: {errors}");
        }
        for snapshot in ["1", "2"] {
            let of = |folder: &Path| {
                let convert = ["convert", "-O", "raw", "-l", snapshot, "src.qcow2", "then.raw"];
                let (code, _, errors) = ran(&tool("qemu-img"), folder, &convert);
                assert_eq!(code, Some(0), "{errors}");
                fs::read(folder.join("then.raw")).unwrap()
            };
            assert!(of(&pair.ours) == of(&pair.theirs), "{line}: snapshot {snapshot}");
        }
    }
    // What is written then is in no snapshot.
    let (_, _, errors) = ran(&tool("qemu-io"), &pair.ours, &["-c", "write -P 7 0 8M", "src.qcow2"]);
    assert_eq!(errors, "");
    pair.same_words("snapshot -a 2 src.qcow2");
    let expected = pair.theirs.join("out.raw").display().to_string();
    pair.assert_equal("src.qcow2", &expected, &[]);
}

#[test]
fn bitmaps_are_converted_as_by_qemu_img() {
    let pair = with_source();
    pair.prepare(&[
        "qemu-img bitmap --add -g 32k src.qcow2 a",
        "qemu-io -c write~-P~1~1M~100k src.qcow2",
        "qemu-img bitmap --add --disable src.qcow2 b",
    ]);
    pair.same_words("convert --bitmaps -O qcow2 src.qcow2 out.qcow2");
    let bitmaps = |folder: &Path| {
        let info = ["info", "--output=json", "out.qcow2"];
        let (_, text, _) = ran(&tool("qemu-img"), folder, &info);
        let info: serde_json::Value = serde_json::from_str(&text).unwrap();
        let server = folder.join("out.sock");
        let _ = fs::remove_file(&server);
        let listen =
            ["-f", "qcow2", "-r", "-B", "a", "--fork", "-k", server.to_str().unwrap(), "out.qcow2"];
        let (code, _, errors) = ran(&tool("qemu-nbd"), folder, &listen);
        assert_eq!(code, Some(0), "{errors}");
        let options = format!(
            "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:a",
            server.display()
        );
        let map = ["map", "--output=json", "--image-opts", &options];
        let (code, map, errors) = ran(&tool("qemu-img"), folder, &map);
        assert_eq!(code, Some(0), "{errors}");
        (info["format-specific"]["data"]["bitmaps"].clone(), map)
    };
    let ours = bitmaps(&pair.ours);
    assert!(ours.0.as_array().is_some_and(|all| all.len() == 2), "{ours:?}");
    assert!(ours.1.contains("\"data\": false"), "a part is dirty: {}", ours.1);
    assert_eq!(ours, bitmaps(&pair.theirs));
    // They are there already.
    pair.same_words("convert --bitmaps -n -O qcow2 src.qcow2 out.qcow2");
}

/// A server of a disk that cannot be read in one place.
#[test]
fn what_can_be_read_is_salvaged() {
    let pair = Pair::new();
    pair.prepare(&[
        "qemu-img create -q -f raw src.raw 4M",
        "qemu-io -f raw -c write~-P~5~0~4M src.raw",
    ]);
    let rules =
        "[inject-error]\nevent = \"none\"\niotype = \"read\"\nsector = \"4099\"\nerrno = \"5\"\n";
    fs::write(pair.ours.join("rules"), rules).unwrap();
    let source = "driver=blkdebug,config=rules,image.driver=file,image.filename=src.raw";
    let convert = |more: &[&str]| {
        let last = ["--image-opts", source, "out.raw"];
        pair.ours(&[&["convert", "-O", "raw"], more, &last].concat())
    };
    let (code, _, errors) = convert(&[]);
    assert!(code == Some(1) && errors.contains("error while reading at byte"), "{errors}");
    let (code, _, errors) = convert(&["--salvage"]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("error while reading at byte 2098688"), "{errors}");
    let mut expected = vec![5; 4 << 20];
    expected[4099 * 512..4100 * 512].fill(0);
    assert!(fs::read(pair.ours.join("out.raw")).unwrap() == expected);
}

#[test]
fn commits_and_rebases_keep_contents() {
    let pair = with_source();
    pair.prepare(&[
        "qemu-img create -q -f qcow2 -b src.qcow2 -F qcow2 mid.qcow2",
        "qemu-io -c write~-P~9~64k~64k -c write~-z~1M~64k mid.qcow2",
        "qemu-img create -q -f qcow2 -b mid.qcow2 -F qcow2 top.qcow2 18M",
        "qemu-io -c write~-P~10~3M~100k -c write~-P~11~17M~64k top.qcow2",
        "qemu-img create -q -f qcow2 other.qcow2 12M",
        "qemu-io -c write~-P~12~2M~1M other.qcow2",
        "qemu-img convert -O raw top.qcow2 contents.raw",
    ]);
    // Another backing file, none, one in the middle; the contents stay.
    for line in [
        "rebase -b other.qcow2 -F qcow2 top.qcow2",
        "rebase -b mid.qcow2 -F qcow2 top.qcow2",
        "rebase -p -b src.qcow2 -F qcow2 top.qcow2",
    ] {
        pair.same_words(line);
        pair.assert_equal("top.qcow2", "contents.raw", &[]);
    }
    // A format that is not given would be found by what a guest writes.
    pair.same_words("rebase -b mid.qcow2 top.qcow2");
    pair.same_words("rebase -u -b mid.qcow2 top.qcow2");
    let (_, info, _) = pair.ours(&["info", "--output=json", "top.qcow2"]);
    assert!(info.contains("\"backing-filename-format\": \"qcow2\""), "{info}");
    pair.same(&["rebase", "-b", "", "top.qcow2"]);
    pair.assert_equal("top.qcow2", "contents.raw", &[]);
    pair.same_words("rebase -u -b mid.qcow2 -F qcow2 top.qcow2");
    // What is committed is in the image behind, also if that was shorter.
    pair.same_words("commit -b src.qcow2 top.qcow2");
    pair.assert_equal("src.qcow2", "contents.raw", &[]);
    let pair = with_source();
    pair.prepare(&[
        "qemu-img create -q -f qcow2 -b src.qcow2 -F qcow2 top.qcow2 18M",
        "qemu-io -c write~-P~9~64k~64k -c write~-z~1M~64k -c write~-P~4~17M~1M top.qcow2",
        "qemu-img convert -O raw top.qcow2 contents.raw",
    ]);
    pair.same_words("commit top.qcow2");
    pair.assert_equal("src.qcow2", "contents.raw", &[]);
    pair.assert_equal("top.qcow2", "contents.raw", &[]);
    let (code, text, _) = ran(&tool("qemu-img"), &pair.ours, &["check", "-q", "src.qcow2"]);
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn dd_copies_the_same_part() {
    for line in [
        "dd if=src.qcow2 of=x bs=1M count=2",
        "dd if=src.qcow2 of=x bs=64k skip=1 count=17",
        "dd if=src.qcow2 of=x",
        "dd -O qcow2 if=src.qcow2 of=x bs=1M skip=1",
    ] {
        let pair = with_source();
        pair.same_words(line);
        let theirs = pair.theirs.join("x").display().to_string();
        // A size that differs gives a warning.
        let (code, text, errors) = ran(&tool("qemu-img"), &pair.ours, &["compare", "x", &theirs]);
        assert_eq!((code, &*text), (Some(0), "Images are identical.\n"), "{line}: {errors}");
    }
}

/// Whatever the bytes of a header are, a description ends with an answer or an error, within its memory.
#[test]
fn damaged_headers_end_in_an_error() {
    let pair = Pair::of_one_folder();
    pair.prepare(&[
        "qemu-img create -q -f qcow2 base.qcow2 64M",
        "qemu-img snapshot -c one base.qcow2",
        "qemu-img bitmap --add base.qcow2 writes",
    ]);
    let whole = fs::read(pair.ours.join("base.qcow2")).expect("it was made");
    let mut random = fastrand::Rng::with_seed(48);
    let (mut described, mut refused) = (0, 0);
    for _ in 0..60 {
        let mut image = whole.clone();
        for _ in 0..random.usize(1..4) {
            // The first clusters have the header, its extensions, and the tables.
            let most = if random.bool() { 200 } else { image.len() };
            let at = random.usize(4..most);
            image[at] = random.u8(..);
        }
        image.truncate(random.usize(100..=image.len() * 2));
        fs::write(pair.ours.join("damaged"), image).expect("writable");
        let (code, _, errors) = pair.ours(&["info", "-f", "qcow2", "damaged"]);
        match code {
            Some(0) => described += 1,
            Some(1) => refused += 1,
            code => panic!("{code:?}: {errors}"),
        }
    }
    assert!(described > 0 && refused > 0, "{described} {refused}");
}
