//! What images may be like, and what is refused.

use block::NodeRegistry;
use block::options::{Backing, BlockdevOptions, BlockdevRef, Qcow2Options};

use crate::qcow2::image::{Folder, contents, driver, open, options, qemu_img, qemu_io};

/// How opening the image ends: the sentence, and what to do.
fn refusal(options: &BlockdevOptions) -> String {
    match NodeRegistry::new().open(options) {
        Ok(_) => panic!("it was opened"),
        Err(error) => format!("{error}: {}", error.hint().unwrap_or_default()),
    }
}

fn create(folder: &Folder, options: &str) {
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", "1M"]);
}

#[test]
fn unsupported_variants_are_refused() {
    let folder = Folder::new("refused");
    let path = folder.path("disk.qcow2");
    create(&folder, "extended_l2=on,cluster_size=16k");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[23] = 13;
    std::fs::write(&path, bytes).unwrap();
    assert!(refusal(&options(&path)).contains("Unsupported subcluster size: 256"));
    create(&folder, "compression_type=zstd");
    patch(&folder, 104, 2);
    assert!(refusal(&options(&path)).contains("Unknown compression type: 3"));
    create(&folder, "compression_type=zlib");
    patch(&folder, 104, 1);
    assert!(refusal(&options(&path)).contains("compression type and"));
    let args = ["create", "-q", "-f", "qcow2", "--object", "secret,id=s,data=x", "-o"];
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    qemu_img(&folder, &[&args[..], &[luks, "disk.qcow2", "1M"]].concat());
    assert!(refusal(&options(&path)).contains("encrypt.key-secret="));
    std::fs::write(&path, vec![0; 4096]).unwrap();
    assert!(refusal(&options(&path)).contains("not in qcow2 format"));
    std::fs::write(&path, b"QFI\xfb\0\0\0\x03").unwrap();
    assert!(refusal(&options(&path)).contains("Unsupported cluster size"));
}

/// Sets a byte of the header.
fn patch(folder: &Folder, at: usize, byte: u8) {
    let mut bytes = std::fs::read(folder.path("disk.qcow2")).unwrap();
    bytes[at] |= byte;
    std::fs::write(folder.path("disk.qcow2"), bytes).unwrap();
}

#[test]
fn corrupt_images_are_refused_with_advice_and_dirty_ones_repaired() {
    let folder = Folder::new("dirty");
    let path = folder.path("disk.qcow2");
    create(&folder, "lazy_refcounts=on");
    patch(&folder, 79, 2);
    let refused = refusal(&options(&path));
    assert!(refused.contains("corrupt") && refused.contains("check --repair all"), "{refused}");
    qemu_img(&folder, &["check", "-q", "-r", "all", "disk.qcow2"]);
    open(&options(&path));
    // Reading needs no counts.
    patch(&folder, 79, 1);
    let before = std::fs::read(&path).unwrap();
    open(&BlockdevOptions { read_only: true, ..options(&path) });
    assert!(std::fs::read(&path).unwrap() == before);
    open(&options(&path));
    assert_eq!(std::fs::read(&path).unwrap()[79], 0);
}

#[test]
fn the_backing_option_may_be_given_or_omitted() {
    let folder = Folder::new("backing");
    for (name, byte) in [("a.raw", 1), ("b.raw", 2)] {
        std::fs::write(folder.path(name), vec![byte; 1 << 20]).unwrap();
    }
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "a.raw", "disk.qcow2"]);
    let path = folder.path("disk.qcow2");
    assert!(contents(&open(&options(&path))) == vec![1; 1 << 20]);
    let none = BlockdevOptions { driver: driver(&path, Backing::None), ..options(&path) };
    assert!(contents(&open(&none)) == vec![0; 1 << 20]);
    let other = crate::common::blockdev("b", crate::common::file(&folder.path("b.raw"), None));
    let mut registry = NodeRegistry::new();
    registry.open(&other).unwrap();
    let named = Backing::Node(BlockdevRef::Name("b".into()));
    let named = BlockdevOptions { driver: driver(&path, named), ..options(&path) };
    assert!(contents(&registry.open(&named).unwrap()) == vec![2; 1 << 20]);
    drop(registry);
    // Behind itself lies what never ends.
    qemu_img(
        &folder,
        &["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "disk.qcow2", "disk.qcow2"],
    );
    let mut read_only = BlockdevOptions { read_only: true, ..options(&path) };
    let qcow2: &mut Qcow2Options = read_only.driver.downcast_mut().unwrap();
    let BlockdevRef::Inline(below) = &mut qcow2.file else { unreachable!() };
    below.read_only = true;
    // As the control thread's stack.
    let refused = on_a_stack(8 << 20, move || refusal(&read_only));
    assert!(refused.contains("lies behind more than"), "{refused}");
}

/// The longest chain, by options: it is opened, read from and closed within a thread's stack. Release builds leave three
/// quarters of it.
#[test]
fn the_longest_chain_fits_the_stacks_of_threads() {
    const LEVELS: usize = 256;
    let folder = Folder::new("longest");
    let path = |n: usize| folder.path(&format!("{n}.qcow2"));
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "0.qcow2", "1M"]);
    for n in 1..=LEVELS {
        std::fs::copy(path(0), path(n)).unwrap();
    }
    qemu_io(&folder, "0.qcow2", "write -P 7 0 64k");
    let options = {
        (0..=LEVELS).fold(None, |behind: Option<BlockdevOptions>, n| {
            let backing = behind.map_or(Backing::None, |behind| {
                Backing::Node(BlockdevRef::Inline(Box::new(BlockdevOptions {
                    node_name: None,
                    read_only: true,
                    ..behind
                })))
            });
            let mut image = options(&path(n));
            image.driver = driver(&path(n), backing);
            Some(image)
        })
    };
    let options = options.unwrap();
    let room = |whole: usize| if cfg!(debug_assertions) { whole } else { whole / 4 };
    // The control thread's stack. Other threads, such as I/O threads, read and close.
    let opened =
        on_a_stack(room(8 << 20), move || (NodeRegistry::new().open(&options).unwrap(), options));
    let (node, options) = opened;
    let node = on_a_stack(room(2 << 20), move || {
        assert!(contents(&node)[..65536] == [7; 65536]);
        node
    });
    on_a_stack(room(2 << 20), move || drop(node));
    on_a_stack(room(2 << 20), move || drop(options));
}

/// Runs something on a thread with that stack, bytes.
fn on_a_stack<T: Send + 'static>(room: usize, run: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::Builder::new().stack_size(room);
    thread.spawn(run).unwrap().join().unwrap()
}

/// The error is QEMU's, with one prefix per image on the way to the missing file.
#[test]
fn a_missing_backing_file_is_said_to_be_one() {
    let folder = Folder::new("missing");
    std::fs::write(folder.path("base.raw"), vec![0; 1 << 20]).unwrap();
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "mid.qcow2"]);
    qemu_img(
        &folder,
        &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "mid.qcow2", "top.qcow2"],
    );
    std::fs::remove_file(folder.path("base.raw")).unwrap();
    let refused = |name: &str| refusal(&options(&folder.path(name)));
    let missing = format!(
        "Could not open '{}': No such file or directory",
        folder.path("base.raw").display()
    );
    let backing = "Could not open backing file: ";
    assert_eq!(refused("mid.qcow2"), format!("{backing}{missing}: "));
    assert_eq!(refused("top.qcow2"), format!("{backing}{backing}{missing}: "));
    let path = folder.path("top.qcow2");
    let named = Backing::Node(BlockdevRef::Name("nowhere".into()));
    let named = BlockdevOptions { driver: driver(&path, named), ..options(&path) };
    let unknown = "Cannot find device='nowhere' nor node-name='nowhere'";
    let refused = refusal(&named);
    assert!(refused.starts_with(&format!("{backing}{unknown}: ")), "{refused}");
}

#[test]
fn data_may_lie_in_a_file_of_its_own() {
    let folder = Folder::new("data-file");
    qemu_img(
        &folder,
        &["create", "-q", "-f", "qcow2", "-o", "data_file=DIR/data", "disk.qcow2", "1M"],
    );
    let node = open(&options(&folder.path("disk.qcow2")));
    let mut rig = crate::common::Rig::new(node.clone());
    rig.write(70_000 / 512 * 512, &[5; 4096], 0).unwrap();
    drop(rig);
    let all = contents(&node);
    drop(node);
    crate::qcow2::image::judge(&folder, "disk.qcow2", &all);
    assert!(std::fs::metadata(folder.path("data")).unwrap().len() > 70_000);
}

#[test]
fn snapshots_inside_stay_as_they_are() {
    let folder = Folder::new("snapshots");
    create(&folder, "cluster_size=64k");
    qemu_io(&folder, "disk.qcow2", "write -P 1 0 1M");
    qemu_img(&folder, &["snapshot", "-c", "before", "disk.qcow2"]);
    let node = open(&options(&folder.path("disk.qcow2")));
    let mut rig = crate::common::Rig::new(node.clone());
    rig.write(100 * 1024, &[2; 300 * 1024], 0).unwrap();
    drop(rig);
    let all = contents(&node);
    drop(node);
    crate::qcow2::image::judge(&folder, "disk.qcow2", &all);
    assert!(all[..100 * 1024].iter().all(|b| *b == 1) && all[150 * 1024] == 2);
    qemu_img(&folder, &["snapshot", "-a", "before", "disk.qcow2"]);
    let node = open(&options(&folder.path("disk.qcow2")));
    assert!(contents(&node) == vec![1; 1 << 20]);
}
