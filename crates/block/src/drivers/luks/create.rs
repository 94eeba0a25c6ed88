//! `blockdev-create`: creates an encrypted disk in a node.

use std::sync::Arc;

use ::options::table::{self, Choice, Field, Kind, Need, Table, not_yet, only_off, put};
use crypto::Secret;
use event_loop::{AlignedBuf, EventLoop, IoBufs, LoopConfig};
use nix::errno::Errno;

use crate::create::{CHUNK, CreateContext, CreateKind, Creating, NewImage, Preallocation};
use crate::drivers::encryption::{LuksDraft, NewLuks, password};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::request::Op;
use crate::submit::submit;

pub(super) static CREATE: CreateKind =
    CreateKind { help: "an encrypted disk in a node", options: &OPTIONS };

/// A disk to be created.
#[derive(Debug)]
struct NewDisk {
    /// The node.
    file: String,
    /// Bytes of the disk.
    size: u64,
    luks: NewLuks,
    preallocation: Preallocation,
}

impl NewImage for NewDisk {
    fn nodes(&self) -> Vec<&str> {
        vec![&self.file]
    }

    fn create(self: Box<Self>, context: &CreateContext<'_>) -> Creating {
        let NewDisk { file, size, luks, preallocation } = *self;
        let credentials = context.nodes.known_credentials();
        let found = password(credentials, luks.key_secret.as_deref(), "key-secret");
        let end = luks.header_len().checked_add(size).filter(|end| i64::try_from(*end).is_ok());
        let end = end.ok_or_else(|| OpenError::new("The requested file size is too large"));
        let begun = found.and_then(|password| Ok((password, end?)));
        let begun = begun.map(|(password, end)| (password, end, context.grow(&file, end)));
        let on_thread = context.on_thread.clone();
        Box::pin(async move {
            let (password, end, grown) = begun?;
            let node = grown.await?;
            on_thread(Box::new(move || {
                let header = luks.make(&password)?;
                write(&node, header, end, preallocation)
            }))
            .await
        })
    }
}

/// Writes the header, and allocates what is behind it up to `end`.
fn write(
    node: &Arc<dyn BlockNode>,
    header: Secret,
    end: u64,
    preallocation: Preallocation,
) -> Result<(), OpenError> {
    let failed = |errno: Errno| {
        OpenError::os(format!("Could not write LUKS header to '{}'", node.name()), errno)
    };
    let of_io =
        |error: std::io::Error| failed(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw));
    if node.geometry().read_only {
        return Err(OpenError::new(format!("Block node '{}' is read-only", node.name())));
    }
    let config = LoopConfig { name: "luks".into(), entries: 32, ..LoopConfig::default() };
    let event_loop = EventLoop::new(config).map_err(|error| of_io(error.error))?;
    let channel = node.clone().open_channel(&event_loop).map_err(of_io)?;
    let written = event_loop.block_on(async move {
        let payload = header.len() as u64;
        // The header last: a creation that is cut off leaves no disk.
        let op = Op::WriteZeroes { may_unmap: false, no_fallback: false, fua: false };
        let write = Op::Write { fua: false };
        let mut at = payload;
        while preallocation != Preallocation::Off && at < end {
            let len = (end - at).min(CHUNK as u64);
            let (op, bufs) = match preallocation {
                // The zeroes read as noise.
                Preallocation::Full => (write, memory(len as usize)?),
                Preallocation::Falloc | Preallocation::Off => (op, IoBufs::new()),
            };
            submit(&channel, op, at, len, bufs).await.0?;
            at += len;
        }
        let mut bufs = memory(header.len())?;
        bufs.copy_in(0, &header);
        submit(&channel, write, 0, payload, bufs).await.0?;
        submit(&channel, Op::Flush, 0, 0, IoBufs::new()).await.0
    });
    written.map_err(of_io)?.map_err(failed)
}

/// Zeroes.
fn memory(len: usize) -> Result<IoBufs, Errno> {
    AlignedBuf::io_bufs(len, 4096).ok_or(Errno::ENOMEM)
}

#[derive(Default)]
struct Draft {
    file: Option<String>,
    size: u64,
    luks: NewLuks,
    preallocation: Preallocation,
}

impl LuksDraft for Draft {
    fn luks(&mut self) -> &mut NewLuks {
        &mut self.luks
    }
}

static OPTIONS: Table<Draft, Box<dyn NewImage>> = Table {
    fields: &[
        Field {
            name: "file",
            kind: Kind::Text { meta: "<node>", set: |disk, node| put(&mut disk.file, Some(node)) },
            need: Need::Required,
            help: "the node that it is made in, over the node's contents",
        },
        Field {
            name: "size",
            kind: Kind::Bytes(|disk, size| put(&mut disk.size, size)),
            need: Need::Required,
            help: "size of the disk",
        },
        Draft::KEY_SECRET,
        Draft::CIPHER_ALG,
        Draft::CIPHER_MODE,
        Draft::IVGEN_ALG,
        Draft::IVGEN_HASH_ALG,
        Draft::HASH_ALG,
        Draft::ITER_TIME,
        Field {
            name: "preallocation",
            kind: Kind::Choice(&[
                Choice {
                    name: "off",
                    help: "nothing is allocated",
                    set: |disk| put(&mut disk.preallocation, Preallocation::Off),
                },
                Choice {
                    name: "metadata",
                    help: "as off",
                    set: |disk| put(&mut disk.preallocation, Preallocation::Off),
                },
                Choice {
                    name: "falloc",
                    help: "its space is reserved",
                    set: |disk| put(&mut disk.preallocation, Preallocation::Falloc),
                },
                Choice {
                    name: "full",
                    help: "its space is written",
                    set: |disk| put(&mut disk.preallocation, Preallocation::Full),
                },
            ]),
            need: Need::Default("off"),
            help: "how its space is allocated beforehand",
        },
        Field::unoffered("detached-header", only_off),
        Field::unoffered("header", not_yet),
    ],
    build: |draft| {
        let Draft { file, size, luks, preallocation } = draft;
        let file = file.ok_or_else(|| table::missing("file"))?;
        Ok(Box::new(NewDisk { file, size, luks, preallocation }))
    },
};
