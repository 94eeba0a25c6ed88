//! What QMP tells of block nodes: QEMU's `BlockDeviceInfo`.

use std::fs;
use std::os::unix::fs::MetadataExt;

use block::options::{
    Backing, BlockdevOptions, BlockdevRef, DetectZeroes, Driver, NbdOptions, NbdServerAddr,
    NullOptions, Qcow2Options, RawOptions,
};
use block::{Child, NodeInfo};
use serde_json::{Value as Json, json};

/// The size of a null node that was given none.
const NULL_SIZE: u64 = 1 << 30;

/// What is told of a node.
pub(super) fn info(node: &NodeInfo<'_>) -> Json {
    let BlockdevOptions { driver, cache, detect_zeroes, .. } = node.options;
    let geometry = node.node.geometry();
    let filename = filename(driver);
    let children: Json = node.children.iter().map(child).collect();
    let detect_zeroes = match detect_zeroes {
        DetectZeroes::Off => "off",
        DetectZeroes::On => "on",
        DetectZeroes::Unmap => "unmap",
    };
    json!({
        "node-name": node.name,
        "drv": name(driver),
        "file": filename,
        "ro": geometry.read_only,
        "encrypted": false,
        "active": true,
        "detect_zeroes": detect_zeroes,
        "cache": {"writeback": true, "direct": cache.direct, "no-flush": cache.no_flush},
        "children": children,
        "image": {
            "filename": filename,
            "format": name(driver),
            "virtual-size": geometry.size,
            "actual-size": actual_size(driver),
        },
        "backing_file_depth": 0,
        "write_threshold": 0,
        "bps": 0, "bps_rd": 0, "bps_wr": 0,
        "iops": 0, "iops_rd": 0, "iops_wr": 0,
    })
}

fn child(child: &Child) -> Json {
    json!({"node-name": child.edge.node().name(), "child": child.role})
}

fn name(driver: &Driver) -> &'static str {
    match driver {
        Driver::File(_) => "file",
        Driver::HostDevice(_) => "host_device",
        Driver::Raw(_) => "raw",
        Driver::Qcow2(_) => "qcow2",
        Driver::NullCo(_) => "null-co",
        Driver::NullAio(_) => "null-aio",
        Driver::Nbd(_) => "nbd",
    }
}

/// What the image would be called on QEMU's command line: its path where that says it all, else
/// options in JSON.
fn filename(driver: &Driver) -> String {
    match driver {
        Driver::File(file) | Driver::HostDevice(file) => file.filename.display().to_string(),
        Driver::Raw(RawOptions { file: BlockdevRef::Inline(below), offset: 0, size: None }) => {
            filename(&below.driver)
        }
        Driver::Qcow2(Qcow2Options { file: BlockdevRef::Inline(below), .. }) => {
            filename(&below.driver)
        }
        Driver::NullCo(null) | Driver::NullAio(null) if is_plain(null) => {
            format!("{}://", name(driver))
        }
        Driver::Nbd(nbd) => nbd_uri(nbd),
        _ => format!("json:{}", as_options(driver)),
    }
}

fn nbd_uri(nbd: &NbdOptions) -> String {
    let export = &nbd.export;
    match &nbd.server {
        NbdServerAddr::Unix { path } => {
            format!("nbd+unix:///{export}?socket={}", path.display())
        }
        server @ NbdServerAddr::Inet { .. } if export.is_empty() => format!("nbd://{server}"),
        server @ NbdServerAddr::Inet { .. } => format!("nbd://{server}/{export}"),
    }
}

fn is_plain(null: &NullOptions) -> bool {
    *null == NullOptions { size: NULL_SIZE, latency_ns: 0, read_zeroes: false }
}

fn as_options(driver: &Driver) -> Json {
    let mut options = json!({"driver": name(driver)});
    match driver {
        Driver::File(file) | Driver::HostDevice(file) => {
            options["filename"] = file.filename.display().to_string().into();
        }
        Driver::Raw(raw) => {
            options["file"] = reference(&raw.file);
            options["offset"] = raw.offset.into();
            if let Some(size) = raw.size {
                options["size"] = size.into();
            }
        }
        Driver::Qcow2(qcow2) => {
            options["file"] = reference(&qcow2.file);
            if let Some(data_file) = &qcow2.data_file {
                options["data-file"] = reference(data_file);
            }
            match &qcow2.backing {
                Backing::Implicit => {}
                Backing::None => options["backing"] = Json::Null,
                Backing::Node(backing) => options["backing"] = reference(backing),
            }
        }
        Driver::NullCo(null) | Driver::NullAio(null) => {
            options["size"] = null.size.into();
            options["latency-ns"] = null.latency_ns.into();
            options["read-zeroes"] = null.read_zeroes.into();
        }
        Driver::Nbd(nbd) => {
            options["server"] = match &nbd.server {
                NbdServerAddr::Unix { path } => json!({"type": "unix", "path": path}),
                NbdServerAddr::Inet { host, port, .. } => {
                    json!({"type": "inet", "host": host, "port": port.to_string()})
                }
            };
            options["export"] = nbd.export.as_str().into();
        }
    }
    options
}

fn reference(node: &BlockdevRef) -> Json {
    match node {
        BlockdevRef::Name(name) => name.as_str().into(),
        BlockdevRef::Inline(below) => as_options(&below.driver),
    }
}

/// Bytes that the image takes on its file system.
fn actual_size(driver: &Driver) -> u64 {
    match driver {
        Driver::File(file) | Driver::HostDevice(file) => {
            // Of what is at the path now; what is gone takes none that anybody could find.
            fs::metadata(&file.filename).map_or(0, |metadata| metadata.blocks() * 512)
        }
        Driver::Raw(RawOptions { file: BlockdevRef::Inline(below), .. })
        | Driver::Qcow2(Qcow2Options { file: BlockdevRef::Inline(below), .. }) => {
            actual_size(&below.driver)
        }
        Driver::Raw(_)
        | Driver::Qcow2(_)
        | Driver::NullCo(_)
        | Driver::NullAio(_)
        | Driver::Nbd(_) => 0,
    }
}
