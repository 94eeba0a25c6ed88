//! `query-named-block-nodes`.

use control::qmp::{Member, Reply, Returns};
use event_loop::take_turns;
use options::shape::{Shape, Union, Variant};
use options::table::{Field, Row, put};

use super::super::snapshot::blockdev_snapshot_delete_internal_sync::SNAPSHOT;
use super::super::{Answer, Command, Running};
use crate::Daemon;
use crate::nodes::Listing;

pub(super) static COMMAND: Command<Arguments, Answer> = Command {
    name: "query-named-block-nodes",
    help: "list the block nodes that have names",
    example: r#"{"flat": true}"#,
    arguments: ARGUMENTS,
    returns: Returns::Data("one for each node", Reply::List(&Reply::Object(NODE))),
    records: false,
    run: |daemon, Arguments { flat }| {
        let listing = Listing::new(&daemon.nodes, flat);
        go_on(daemon, listing)
    },
};

/// Describes further nodes. Other commands are executed between the parts of a long answer.
fn go_on(daemon: &mut Daemon, mut listing: Listing) -> Running<'_> {
    Box::pin(async move {
        match listing.describe_more(&daemon.nodes)? {
            true => Ok(listing.into_answer().into()),
            false => Ok(Answer::after(take_turns(), move |daemon, ()| go_on(daemon, listing))),
        }
    })
}

#[derive(Default)]
pub(super) struct Arguments {
    flat: bool,
}

static ARGUMENTS: &[Field<Arguments>] =
    &[Row::default("flat", "off", "leave out what lies below each node's image")
        .bool(|to, flat| put(&mut to.flat, flat))];

const LEFT_OUT: &str =
    "how many the list leaves out: it has at most 1024, whose names have at most 128 KiB";

static NODE: &[Member] = &[
    Member::new("node-name", Reply::Text, "the node's name"),
    Member::new("drv", Reply::Text, "its driver"),
    Member::new("file", Reply::Text, "its image: a path, or options in JSON"),
    Member::new("ro", Reply::Bool, "it is read-only"),
    Member::new("encrypted", Reply::Bool, "it is encrypted; always false"),
    Member::new(
        "active",
        Reply::Bool,
        "the node has its image open; false after blockdev-set-active active=false",
    ),
    Member::new(
        "detect_zeroes",
        Reply::Word(&["off", "on", "unmap"]),
        "what happens to writes of zeroes",
    ),
    Member::new("cache", Reply::Object(CACHE), "how the host's page cache is used"),
    Member::new("children", Reply::List(&Reply::Object(CHILD)), "the nodes below that have names"),
    Member::new("image", Reply::Object(IMAGE), "what is known of the image"),
    Member::new("backing_file_depth", Reply::Int, "images below it that it shows as they are"),
    Member::optional("dirty-bitmaps", Reply::List(&Reply::Object(BITMAP)), "its dirty bitmaps"),
    Member::optional("x-dirty-bitmaps-left-out", Reply::Int, LEFT_OUT),
    Member::optional(
        "backing_file",
        Reply::Text,
        "the image behind it: a path, or options in JSON",
    ),
    Member::new(
        "write_threshold",
        Reply::Int,
        "the byte that block-set-write-threshold has set; 0: none",
    ),
    Member::new("bps", Reply::Int, "always 0"),
    Member::new("bps_rd", Reply::Int, "always 0"),
    Member::new("bps_wr", Reply::Int, "always 0"),
    Member::new("iops", Reply::Int, "always 0"),
    Member::new("iops_rd", Reply::Int, "always 0"),
    Member::new("iops_wr", Reply::Int, "always 0"),
];

static BITMAP: &[Member] = &[
    Member::optional(
        "name",
        Reply::Text,
        "the bitmap's name; without one: writes since a job began to use a bitmap",
    ),
    Member::new("recording", Reply::Bool, "it records writes"),
    Member::new("busy", Reply::Bool, "a job or an export uses it"),
    Member::new("persistent", Reply::Bool, "it is stored in the image when that is closed"),
    Member::new("granularity", Reply::Int, "bytes of a part, which has one bit"),
    Member::new(
        "count",
        Reply::Int,
        "bytes in parts that were written to; before the job, if a job uses the bitmap",
    ),
    Member::optional(
        "inconsistent",
        Reply::Bool,
        "damaged, or the image was not closed since its last change: it can only be removed",
    ),
];

static STORED_BITMAP: &[Member] = &[
    Member::new("name", Reply::Text, "the bitmap's name"),
    Member::new("granularity", Reply::Int, "bytes of a part, which has one bit"),
    Member::new(
        "flags",
        Reply::List(&Reply::Word(&["in-use", "auto"])),
        "in-use: not stored since the image was opened; auto: it notes writes",
    ),
];

static CACHE: &[Member] = &[
    Member::new("writeback", Reply::Bool, "writes are answered before they are flushed"),
    Member::new("direct", Reply::Bool, "the page cache is bypassed"),
    Member::new("no-flush", Reply::Bool, "flushes are ignored"),
];

static CHILD: &[Member] = &[
    Member::new("child", Reply::Text, "its role for the parent node"),
    Member::new("node-name", Reply::Text, "its name"),
];

static IMAGE: &[Member] = &[
    Member::new("filename", Reply::Text, "its path, or options in JSON"),
    Member::new("format", Reply::Text, "its driver"),
    Member::new("virtual-size", Reply::Int, "size of the disk, in bytes"),
    Member::new("actual-size", Reply::Int, "its allocated size, in bytes"),
    Member::new("limits", Reply::Object(LIMITS), "what requests to it should keep to"),
    Member::optional("dirty-flag", Reply::Bool, "it was not closed properly; always false"),
    Member::optional("cluster-size", Reply::Int, "of an image format: bytes of a cluster"),
    Member::optional("backing-filename", Reply::Text, "the backing file that the image names"),
    Member::optional("backing-filename-format", Reply::Text, "its format, as the image names it"),
    Member::optional("full-backing-filename", Reply::Text, "the path of that file"),
    Member::optional("encrypted", Reply::Bool, "whether it is encrypted"),
    Member::optional("format-specific", Reply::As(specific), "what only its driver knows"),
    Member::optional(
        "snapshots",
        Reply::List(&Reply::Object(SNAPSHOT)),
        "snapshots inside the image",
    ),
    Member::optional("x-snapshots-left-out", Reply::Int, LEFT_OUT),
    Member::optional("backing-image", Reply::Any, "the same of the image that it shows as it is"),
];

static LIMITS: &[Member] = &[
    Member::new("request-alignment", Reply::Int, "of ranges, in bytes"),
    Member::new("min-mem-alignment", Reply::Int, "of memory, in bytes; less costs a copy"),
    Member::new("opt-mem-alignment", Reply::Int, "of memory, in bytes, where it can be chosen"),
    Member::new("max-iov", Reply::Int, "most segments of memory at once"),
    Member::optional("discard-alignment", Reply::Int, "of discards that give space back, in bytes"),
    Member::optional("write-zeroes-alignment", Reply::Int, "of efficient write-zeroes, in bytes"),
];

/// QEMU's `ImageInfoSpecific`.
fn specific() -> Shape {
    let variant = |name, help, data| Variant {
        name,
        help,
        example: "",
        members: vec![Member::new("data", Reply::Object(data), "what is known").shape()],
    };
    Shape::Union(Union {
        tag: "type",
        help: "the driver",
        common: Vec::new(),
        variants: vec![
            variant("file", "a file: nothing more is known", &[]),
            variant("qcow2", "a qcow2 image", QCOW2),
            variant("luks", "an encrypted disk", LUKS),
            variant("rbd", "an image of a Ceph cluster", RBD),
        ],
    })
}

/// QEMU's `ImageInfoSpecificQCow2Encryption`.
fn encryption() -> Shape {
    Shape::Union(Union {
        tag: "format",
        help: "the format",
        common: Vec::new(),
        variants: vec![Variant {
            name: "luks",
            help: "LUKS, version 1",
            example: "",
            members: LUKS.iter().map(Member::shape).collect(),
        }],
    })
}

static RBD: &[Member] = &[Member::optional(
    "encryption-format",
    Reply::Word(&["luks", "luks2"]),
    "of contents with an encryption header",
)];

static LUKS: &[Member] = &[
    Member::new("cipher-alg", Reply::Word(&["aes-128", "aes-192", "aes-256"]), "the cipher"),
    Member::new("cipher-mode", Reply::Word(&["cbc", "ctr", "xts"]), "its mode of operation"),
    Member::new(
        "ivgen-alg",
        Reply::Word(&["plain", "plain64", "essiv"]),
        "where initialisation vectors come from",
    ),
    Member::optional("ivgen-hash-alg", Reply::Word(&["sha256"]), "the digest that those need"),
    Member::new(
        "hash-alg",
        Reply::Word(&["sha1", "sha224", "sha256", "sha384", "sha512", "ripemd160"]),
        "the digest that keys are derived with",
    ),
    Member::new("detached-header", Reply::Bool, "whether the header lies elsewhere"),
    Member::new("payload-offset", Reply::Int, "where the encrypted data begin, in bytes"),
    Member::new("master-key-iters", Reply::Int, "iterations of the key's digest"),
    Member::new("uuid", Reply::Text, "the disk's UUID"),
    Member::new("slots", Reply::List(&Reply::Object(LUKS_SLOT)), "places for passwords"),
];

static LUKS_SLOT: &[Member] = &[
    Member::new("active", Reply::Bool, "whether it has a password"),
    Member::optional("iters", Reply::Int, "iterations of the password's key"),
    Member::optional("stripes", Reply::Int, "parts that the key is split into"),
    Member::new("key-offset", Reply::Int, "where it is, in bytes"),
];

static QCOW2: &[Member] = &[
    Member::optional(
        "bitmaps",
        Reply::List(&Reply::Object(STORED_BITMAP)),
        "dirty bitmaps, as the file has them",
    ),
    Member::optional("x-bitmaps-left-out", Reply::Int, LEFT_OUT),
    Member::new("compat", Reply::Text, "the version: 0.10 (2) or 1.1 (3)"),
    Member::optional("lazy-refcounts", Reply::Bool, "reference counts may be written late"),
    Member::optional("corrupt", Reply::Bool, "the image is marked as corrupt"),
    Member::optional("extended-l2", Reply::Bool, "clusters have subclusters"),
    Member::optional("data-file", Reply::Text, "the external data file that the image names"),
    Member::optional("data-file-raw", Reply::Bool, "the data file has the disk's bytes one to one"),
    Member::new("refcount-bits", Reply::Int, "bits of a reference count"),
    Member::new("compression-type", Reply::Word(&["zlib", "zstd"]), "how clusters are compressed"),
    Member::optional("encrypt", Reply::As(encryption), "how data is encrypted"),
];
