//! What nodes can do besides I/O, and what filters pass on of the nodes below.

use std::sync::Arc;

use ::options::json;
use ::options::table::Context;
use ::options::value::Dialect;
use block::node::BlockNode;
use block::options::read_blockdev;
use block::throttle::{ThrottleGroup, ThrottleLimits};
use block::{CreateQcow2, NodeRegistry, create_qcow2};
use event_loop::{EventLoop, LoopConfig};

use crate::common::web::{WebServer, part};
use crate::common::{TempFile, disk};

const SIZE: u64 = 1 << 20;

fn capabilities(node: &Arc<dyn BlockNode>) -> String {
    let storage = node.clone().host_storage();
    let remote = node.clone().remote_image();
    let has = [
        (node.clone().growing_file().is_some(), "growing"),
        (storage.as_ref().is_some_and(|storage| storage.place().is_some()), "place"),
        (storage.as_ref().is_some_and(|storage| storage.allocated().is_some()), "allocated"),
        (storage.is_some_and(|storage| storage.foreign_format().is_some()), "format"),
        (remote.as_ref().is_some_and(|remote| remote.content().is_some()), "content"),
        (remote.as_ref().is_some_and(|remote| remote.stop_waiting().is_some()), "stop"),
        (remote.is_some_and(|remote| !remote.may_name_files()), "untrusted"),
        (node.clone().image().is_some(), "image"),
        (node.clone().internal_snapshots().is_some(), "snapshots"),
        (node.clone().held_state().is_some(), "state"),
        (node.compresses(), "compresses"),
        (node.snapshot().is_some(), "snapshot"),
        (node.can_forget(), "forgets"),
    ];
    has.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect::<Vec<_>>().join(" ")
}

/// Opens the node of the options in JSON. Single quotes are double ones there.
fn open(nodes: &mut NodeRegistry, options: &str) -> Arc<dyn BlockNode> {
    let options = json::parse(&options.replace('\'', "\"")).unwrap();
    let options = read_blockdev(options, &Context::new(Dialect::Json)).unwrap();
    drop(nodes.open(&options).unwrap());
    nodes.node(options.node_name.as_deref().unwrap()).unwrap()
}

/// What an edge passes on of what a node can do.
fn through_an_edge(of_node: &str) -> String {
    let stays = |word: &&str| !["image", "state", "forgets"].contains(word);
    of_node.split(' ').filter(stays).collect::<Vec<_>>().join(" ")
}

/// `disk` stands for a qcow2 image in a file, `file` for that file, and `target` for an empty one.
#[test]
fn of_nodes_on_files() {
    let image = TempFile::new(&disk(), "capable.qcow2", 0);
    create_qcow2(&image.0, &CreateQcow2::new(SIZE)).unwrap();
    let target = TempFile::new(&disk(), "capable.raw", SIZE as usize);
    let file = |path: &TempFile| {
        format!("{{'driver':'file','locking':'off','filename':'{}'}}", path.0.display())
    };
    let qcow2 = format!("{{'driver':'qcow2','file':{}}}", file(&image));
    let kept =
        format!("{{'driver':'copy-before-write','file':{qcow2},'target':{}}}", file(&target));
    let rows = [
        ("'driver':'null-co','size':512", ""),
        ("'driver':'raw','file':file", "growing place allocated format"),
        ("'driver':'raw','offset':512,'file':file", "growing place allocated"),
        (
            "'driver':'raw','file':{'driver':'raw','offset':512,'file':file}",
            "growing place allocated",
        ),
        ("'driver':'preallocate','file':file", "place allocated format state"),
        ("'driver':'throttle','throttle-group':'g','file':file", "place allocated format"),
        ("'driver':'qcow2','file':file", "allocated image snapshots state compresses"),
        ("'driver':'raw','file':disk", "growing allocated snapshots"),
        ("'driver':'throttle','throttle-group':'g','file':disk", "allocated snapshots compresses"),
        ("'driver':'copy-on-read','file':disk", "allocated snapshots compresses"),
        ("'driver':'blkdebug','image':disk", "allocated snapshots"),
        ("'driver':'compress','file':disk", "allocated snapshots"),
        (
            "'driver':'copy-before-write','file':disk,'target':target",
            "allocated snapshots state snapshot",
        ),
        ("'driver':'snapshot-access','file':kept", "forgets"),
    ];
    for (row, expected) in rows {
        let mut options = format!("{{'node-name':'top',{row}}}");
        let named = [
            ("kept", &kept),
            ("disk", &qcow2),
            ("file", &file(&image)),
            ("target", &file(&target)),
        ];
        for (name, node) in named {
            options = options.replace(&format!(":{name}}}"), &format!(":{node}}}"));
            options = options.replace(&format!(":{name},"), &format!(":{node},"));
        }
        let mut nodes = NodeRegistry::new();
        nodes.add_throttle_group("g", ThrottleGroup::new(ThrottleLimits::default()).unwrap());
        assert_eq!(capabilities(&open(&mut nodes, &options)), expected, "{row}");
        let edge = nodes.get("top").unwrap();
        assert_eq!(capabilities(&edge), through_an_edge(expected), "{row}, from above");
    }
}

/// A node that dirty bitmaps watch can do what it can do without them.
#[test]
fn of_a_watched_node() {
    let image = TempFile::new(&disk(), "watched.qcow2", 0);
    create_qcow2(&image.0, &CreateQcow2::new(SIZE)).unwrap();
    let mut nodes = NodeRegistry::new();
    let file = format!("{{'driver':'file','filename':'{}'}}", image.0.display());
    let plain = open(&mut nodes, &format!("{{'driver':'qcow2','node-name':'disk','file':{file}}}"));
    let before = capabilities(&plain);
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let watched = event_loop.block_on(async move {
        nodes.track("disk").await.unwrap();
        nodes.node("disk").unwrap()
    });
    let watched = watched.unwrap();
    assert!(!Arc::ptr_eq(&plain, &watched));
    assert_eq!(capabilities(&watched), before);
}

#[test]
fn of_nodes_on_servers() {
    let mut image = vec![0; SIZE as usize];
    let header = TempFile::new(&disk(), "served.qcow2", 0);
    create_qcow2(&header.0, &CreateQcow2::new(SIZE)).unwrap();
    let bytes = header.contents();
    image[..bytes.len()].copy_from_slice(&bytes);
    let server = WebServer::start(move |asked| part(asked, &image, "\"tag\""));
    let http = format!("{{'driver':'http','read-only':true,'url':'{}'}}", server.url("/image"));
    let rows = [
        ("'driver':'raw'", "growing content stop untrusted"),
        ("'driver':'qcow2'", "content image snapshots state compresses"),
    ];
    for (row, expected) in rows {
        let options = format!("{{'node-name':'top','read-only':true,{row},'file':{http}}}");
        assert_eq!(capabilities(&open(&mut NodeRegistry::new(), &options)), expected, "{row}");
    }
}
