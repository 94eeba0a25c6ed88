//! Opening, naming and closing nodes, and what an operator is told when it does not work.

use crate::common;

use std::os::unix::fs::PermissionsExt;

use block::NodeRegistry;
use block::options::*;
use block::request::Op;
use common::*;
use event_loop::{EventLoop, LoopConfig};
use nix::errno::Errno;

fn null(size: u64) -> Driver {
    Driver::null_co(NullOptions { size, latency_ns: 0, read_zeroes: true })
}

fn raw(file: BlockdevRef, offset: u64, size: Option<u64>) -> Driver {
    Driver::from(RawOptions { file, offset, size, keep_raw: false })
}

fn inline(options: BlockdevOptions) -> BlockdevRef {
    BlockdevRef::Inline(Box::new(options))
}

fn unnamed(driver: Driver) -> BlockdevOptions {
    BlockdevOptions { node_name: None, ..blockdev("", driver) }
}

fn unnamed_like(options: &BlockdevOptions) -> BlockdevOptions {
    BlockdevOptions { node_name: None, ..options.clone() }
}

fn error(options: &BlockdevOptions) -> String {
    NodeRegistry::new().open(options).map(drop).unwrap_err().to_string()
}

#[test]
fn names() {
    let mut nodes = NodeRegistry::new();
    nodes.open(&blockdev("n", null(512))).unwrap();
    let said = |o: &BlockdevOptions, nodes: &mut NodeRegistry| {
        nodes.open(o).map(drop).unwrap_err().to_string()
    };
    let n = blockdev("n", null(512));
    assert_eq!(said(&n, &mut nodes), "Duplicate nodes with node-name='n'");
    assert_eq!(
        said(&unnamed(null(512)), &mut nodes),
        "'node-name' must be specified for the root node"
    );
    for bad in ["0bad", "", "a b", "ä", "#block000"] {
        let wanted = format!("Invalid node-name: '{bad}'");
        assert_eq!(said(&blockdev(bad, null(512)), &mut nodes), wanted);
    }
    nodes.open(&blockdev(&"a".repeat(31), null(512))).unwrap();
    assert_eq!(said(&blockdev(&"a".repeat(32), null(512)), &mut nodes), "Node name too long");
    let missing = nodes.get("m").map(drop).unwrap_err();
    assert_eq!(missing.to_string(), "Cannot find device='m' nor node-name='m'");
    assert_eq!(missing.hint(), Some(&*format!("Known nodes: {}, n", "a".repeat(31))));
}

#[test]
fn trees() {
    let image = TempFile::new(&disk(), "tree", 1 << 20);
    let mut nodes = NodeRegistry::new();
    let fds = open_fds();
    nodes.open(&blockdev("top", raw(inline(unnamed(file(&image.0, None))), 0, None))).unwrap();
    assert_eq!(nodes.names().collect::<Vec<_>>(), ["#block000", "top"]);
    assert_eq!(nodes.get("#block000").unwrap().geometry().size, 1 << 20);
    nodes.open(&blockdev("part", raw(BlockdevRef::Name("top".into()), 4096, Some(8192)))).unwrap();
    let busy = nodes.remove("top").unwrap_err();
    assert!(busy.to_string().contains("busy"), "{busy}");
    assert!(nodes.remove("#block000").is_err(), "a nested node goes with the one on top");
    nodes.remove("part").unwrap();
    nodes.remove("top").unwrap();
    assert_eq!(nodes.names().count(), 0);
    assert_eq!(open_fds(), fds, "all files are closed");
    // Names of failed attempts are free again.
    let missing = inline(blockdev("below", file(&image.0.with_extension("gone"), None)));
    assert!(nodes.open(&blockdev("top", raw(missing, 0, None))).is_err());
    let twice = inline(blockdev("top", null(512)));
    assert_eq!(
        nodes.open(&blockdev("top", raw(twice, 0, None))).map(drop).unwrap_err().to_string(),
        "Duplicate nodes with node-name='top'"
    );
    assert_eq!(nodes.names().count(), 0);
}

fn open_fds() -> usize {
    // Other tests run in the same process; only this one opens that file.
    let name = format!("ringmill-{}-tree", std::process::id());
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .filter(|target| target.to_string_lossy().contains(&name))
        .count()
}

#[test]
fn files_that_cannot_be_opened() {
    let gone = "/nonexistent/disk.img".as_ref();
    assert_eq!(
        error(&blockdev("n", file(gone, None))),
        "Could not open '/nonexistent/disk.img': No such file or directory"
    );
    assert_eq!(
        error(&blockdev("n", file("/tmp".as_ref(), None))),
        "Could not open '/tmp': Is a directory"
    );
    assert_eq!(
        error(&blockdev("n", file("/dev/null".as_ref(), None))),
        "'file' driver requires '/dev/null' to be a regular file"
    );
    let image = TempFile::new(&disk(), "kind", 512);
    let device = Driver::host_device(file_options(&image.0, None));
    let error = NodeRegistry::new().open(&blockdev("n", device)).map(drop).unwrap_err();
    assert!(error.to_string().ends_with("to be a block device"), "{error}");
    assert_eq!(error.hint(), Some("driver=file opens regular files"));
}

/// Makes a file that even root cannot write.
struct Unwritable(TempFile);

impl Unwritable {
    fn new(name: &str) -> Self {
        let image = TempFile::new(&disk(), name, 4096);
        std::fs::set_permissions(&image.0, std::fs::Permissions::from_mode(0o444)).unwrap();
        if nix::unistd::geteuid().is_root() {
            Self::immutable(&image, true);
        }
        Unwritable(image)
    }

    fn immutable(image: &TempFile, on: bool) {
        let file = std::fs::File::open(&image.0).unwrap();
        let mut flags = rustix::fs::ioctl_getflags(&file).unwrap();
        flags.set(rustix::fs::IFlags::IMMUTABLE, on);
        rustix::fs::ioctl_setflags(&file, flags).unwrap();
    }
}

impl Drop for Unwritable {
    fn drop(&mut self) {
        if nix::unistd::geteuid().is_root() {
            Self::immutable(&self.0, false);
        }
    }
}

#[test]
fn read_only_and_auto_read_only() {
    let image = Unwritable::new("unwritable");
    let mut options = blockdev("n", file(&image.0.0, None));
    let error = NodeRegistry::new().open(&options).map(drop).unwrap_err();
    assert!(matches!(error.errno(), Some(Errno::EPERM | Errno::EACCES)), "{error}");
    assert!(error.hint().unwrap().contains("auto-read-only=on"), "{error:?}");
    options.auto_read_only = true;
    let node = NodeRegistry::new().open(&options).unwrap();
    assert!(node.geometry().read_only);
    let why = node.why_read_only().unwrap();
    assert_eq!(why.errno(), error.errno());
    drop(node);
    // A node on top of it becomes read-only too, for the same reason.
    let on_top = blockdev("r", raw(inline(unnamed_like(&options)), 0, None));
    let node = NodeRegistry::new().open(&on_top).unwrap();
    assert!(node.geometry().read_only);
    assert_eq!(node.why_read_only().map(|why| why.to_string()), Some(why.to_string()));
    options.auto_read_only = false;
    options.read_only = true;
    let node = NodeRegistry::new().open(&options).unwrap();
    assert!(node.geometry().read_only && !node.geometry().write_cache);
    assert_eq!(Rig::new(node).read(0, 4096, 0).unwrap(), pattern(4096));
}

#[test]
fn raw_checks_its_range() {
    let part = |offset, size| blockdev("r", raw(inline(unnamed(null(9437184))), offset, size));
    assert_eq!(error(&part(512, Some(100))), "Specified size is not multiple of 512: 100");
    assert_eq!(
        error(&part(9437185, None)),
        "Offset (9437185) cannot be greater than size of the containing file (9437184)"
    );
    assert!(error(&part(512, Some(9437184))).starts_with("The sum of offset (512) and size"));
    assert!(error(&part(u64::MAX, Some(512))).starts_with("Offset"));
    let node = NodeRegistry::new().open(&part(9437184, None)).unwrap();
    assert_eq!(node.geometry().size, 0);
    let missing = blockdev("r", raw(BlockdevRef::Name("gone".into()), 0, None));
    assert_eq!(error(&missing), "Cannot find device='gone' nor node-name='gone'");
}

#[test]
fn raw_is_a_window() {
    let image = TempFile::new(&disk(), "window", 65536);
    let below = BlockdevOptions { discard: Discard::Unmap, ..unnamed(file(&image.0, None)) };
    let mut options = blockdev("r", raw(inline(below), 4096, Some(8192)));
    options.discard = Discard::Unmap;
    let node = NodeRegistry::new().open(&options).unwrap();
    assert!(node.geometry().discard, "discards go down where they are let in on top and below");
    let mut rig = Rig::new(node);
    assert_eq!(rig.read(0, 8192, 0).unwrap(), pattern(65536)[4096..12288]);
    rig.write(512, &[9; 512], 0).unwrap();
    assert_eq!(rig.write(8192, &[9; 512], 0), Err(Errno::ENOSPC), "past its end");
    assert_eq!(rig.read(8192, 512, 0), Err(Errno::EIO), "past its end");
    assert_eq!(rig.op(Op::Flush, 0, 0), Ok(()));
    assert_eq!(rig.op(Op::Discard, 4096, 4096), Ok(()));
    drop(rig);
    let mut want = pattern(65536);
    want[4608..5120].fill(9);
    want[8192..12288].fill(0);
    assert!(image.contents() == want);
}

#[test]
fn null_disks() {
    let mut rig = Rig::new(NodeRegistry::new().open(&blockdev("n", null(1000))).unwrap());
    let tag = rig.submit(Op::Read, 512, 512, filled(&[7; 512], 0));
    let (result, bufs) = rig.answer(tag).expect("null-co answers from within the submission");
    assert_eq!((result, bytes(&bufs)), (Ok(()), vec![0; 512]));
    assert_eq!(rig.read(1024, 512, 0), Err(Errno::EIO), "1000 bytes are two sectors");
    for latency_ns in [0, 2_000_000] {
        let options = NullOptions { size: 4096, latency_ns, read_zeroes: false };
        let node = NodeRegistry::new().open(&blockdev("n", Driver::null_aio(options))).unwrap();
        let mut rig = Rig::new(node);
        let start = std::time::Instant::now();
        let tag = rig.submit(Op::Read, 0, 512, filled(&[7; 512], 0));
        assert!(rig.answer(tag).is_none(), "null-aio answers from the loop");
        let (result, bufs) = rig.wait(tag);
        assert_eq!((result, bytes(&bufs)), (Ok(()), vec![7; 512]), "reads leave memory alone");
        assert!(start.elapsed().as_nanos() >= u128::from(latency_ns));
    }
}

#[test]
fn null_disks_behind_an_image_are_read_only() {
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    for driver in
        [null(4096), Driver::null_aio(NullOptions { size: 4096, latency_ns: 0, read_zeroes: true })]
    {
        let mut nodes = NodeRegistry::new();
        let edge = nodes.open(&blockdev("n", driver)).unwrap();
        let made = async move {
            nodes.make_read_only("n").await.unwrap();
            nodes
        };
        let nodes = event_loop.block_on(made).unwrap();
        assert!(nodes.node("n").unwrap().geometry().read_only);
        assert!(edge.geometry().read_only, "its users are moved along");
    }
}

#[test]
fn options_that_contradict_each_other() {
    let mut options = blockdev("n", null(512));
    options.detect_zeroes = DetectZeroes::Unmap;
    assert!(error(&options).starts_with("setting detect-zeroes to unmap is not allowed"));
    options.discard = Discard::Unmap;
    assert!(NodeRegistry::new().open(&options).is_ok());
}

/// Nodes as they are described are opened as the same ones, whatever became of those that were described.
#[test]
fn nodes_are_described_as_they_are() {
    let image = TempFile::new(&disk(), "described", 1 << 20);
    let top_file = TempFile::new(&disk(), "described-top", 0);
    let format = Some((image.0.display().to_string(), Some("raw".to_owned())));
    let create = block::CreateQcow2 { backing: format, ..block::CreateQcow2::new(1 << 20) };
    std::fs::remove_file(&top_file.0).unwrap();
    block::create_qcow2(&top_file.0, &create).unwrap();
    let qcow2 =
        Qcow2Options { file: inline(unnamed(file(&top_file.0, None))), ..Qcow2Options::default() };
    let named = |name: &str| BlockdevRef::Name(name.to_owned());
    let mut nodes = NodeRegistry::new();
    for options in [
        blockdev("top", raw(inline(blockdev("below", null(8192))), 0, None)),
        blockdev("part", raw(named("below"), 0, Some(4096))),
        blockdev("other", null(4096)),
        BlockdevOptions { active: false, ..blockdev("off", null(512)) },
        blockdev("image", Driver::from(qcow2.clone())),
    ] {
        nodes.open(&options).unwrap();
    }
    let order = ["part", "top", "other", "off", "image"];
    let described = nodes.describe(order.into_iter());
    let names: Vec<_> = described.iter().flat_map(|node| node.node_name.as_deref()).collect();
    assert_eq!(names, order);
    // Who comes first has it within, and the other refers to it.
    let child = |node: &BlockdevOptions| node.driver.children().first().map(|c| c.node.clone());
    assert_eq!(child(&described[0]), Some(inline(blockdev("below", null(8192)))));
    assert_eq!(child(&described[1]), Some(named("below")));
    assert!(!described[3].active);
    assert_eq!(described[4].driver, Driver::from(qcow2));

    let control = event_loop::EventLoop::new(event_loop::LoopConfig::default()).unwrap();
    let nodes = control
        .block_on(async move {
            let part = blockdev("part", raw(named("other"), 0, None));
            drop(nodes.reopen("part", &part).await.unwrap());
            // What the header of the image names has been given other options.
            let backing = nodes.info("image").unwrap().children[1].edge.node().name().to_owned();
            let file = nodes.info(&backing).unwrap().children[0].edge.node().name().to_owned();
            let options = nodes.options(&file).unwrap();
            let options = BlockdevOptions { detect_zeroes: DetectZeroes::On, ..options.clone() };
            drop(nodes.reopen(&file, &options).await.unwrap());
            nodes
        })
        .unwrap();
    let described = nodes.describe(order.into_iter());
    let names: Vec<_> = described.iter().flat_map(|node| node.node_name.as_deref()).collect();
    assert_eq!(names, ["other", "part", "top", "off", "image"]);
    assert_eq!(child(&described[1]), Some(named("other")));
    let Some(Qcow2Options { backing: Backing::Node(BlockdevRef::Inline(backing)), .. }) =
        described[4].driver.downcast_ref()
    else {
        panic!("{:?}", described[4])
    };
    let Some(BlockdevRef::Inline(file)) = child(backing) else { panic!("{backing:?}") };
    assert_eq!((&file.node_name, file.detect_zeroes), (&None, DetectZeroes::On));
    drop(nodes);
    let mut nodes = NodeRegistry::new();
    for options in &described {
        nodes.open(options).unwrap();
    }
    assert_eq!(nodes.describe(names.into_iter()), described);
}
