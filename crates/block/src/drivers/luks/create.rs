//! `blockdev-create`: creates an encrypted disk in a node.

use ::options::place::OneOf;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ::options::table::{Field, Row, Table, only_off, put};
use crypto::Secret;
use event_loop::{AlignedBuf, EventLoop, IoBufs, LoopConfig};
use nix::errno::Errno;

use crate::create::{
    CreateContext, CreateKind, Creating, NewImage, Preallocation, both, preallocate, read_node,
    settle,
};
use crate::drivers::encryption::{LuksDraft, NewLuks, password};
use crate::error::OpenError;
use crate::node::{BlockNode, Channel};
use crate::options::{BlockdevRef, ref_shape};
use crate::request::Op;
use crate::submit::submit;

pub(super) static CREATE: CreateKind =
    CreateKind { help: "an encrypted disk in a node", options: &OPTIONS };

/// A disk to be created.
#[derive(Debug)]
struct NewDisk {
    /// The node of the encrypted sectors. `None`: only a header is made.
    file: Option<BlockdevRef>,
    /// The node of the header. `None`: the header is at the beginning of `file`.
    header: Option<BlockdevRef>,
    /// Bytes of the disk.
    size: u64,
    luks: NewLuks,
    preallocation: Preallocation,
}

impl NewImage for NewDisk {
    fn nodes(&mut self) -> Vec<&mut BlockdevRef> {
        self.file.iter_mut().chain(&mut self.header).collect()
    }

    fn create(self: Box<Self>, context: &CreateContext<'_>) -> Creating {
        let NewDisk { file, header, size, luks, preallocation } = *self;
        let [file, header] = [&file, &header].map(|node| node.as_ref().map(BlockdevRef::name));
        let begin = || {
            if file.is_none() && header.is_none() {
                let why = "Either the parameter 'header' or 'file' must be specified";
                return Err(OpenError::new(why));
            }
            if file.is_some() && file == header {
                let why = "Parameters 'header' and 'file' name the same node";
                return Err(OpenError::new(why).with_hint("leave out one of them"));
            }
            let credentials = context.nodes.known_credentials();
            let password = password(credentials, luks.key_secret.as_deref(), "key-secret")?;
            let header_len = luks.header_len();
            let start = if header.is_some() { 0 } else { header_len };
            let end = start.checked_add(size).filter(|end| i64::try_from(*end).is_ok());
            let end = end.ok_or_else(|| OpenError::new("The requested file size is too large"))?;
            check_preallocation(context, file, header.is_some(), end, preallocation)?;
            // The disk is as long as its node allows.
            let header = header.map(|header| context.fit(header, header_len));
            let data = file.map(|file| context.fit(file, end));
            Ok((password, start..end, header, data))
        };
        let begun = begin();
        let on_thread = context.on_thread.clone();
        Box::pin(async move {
            let (password, range, header, data) = begun?;
            let (header, data) = both(header, data).await?;
            let [header_node, data_node] =
                [&header, &data].map(|fitted| fitted.as_ref().map(|fitted| fitted.node.clone()));
            let made = on_thread(Box::new(move || {
                let bytes = luks.make(&password)?;
                if let Some(data) = &data_node {
                    let what = preallocation.failure();
                    run(data, what, async move |data| allocate(data, range, preallocation).await)?;
                }
                // The header last: a creation that is cut off leaves no disk.
                match header_node.or(data_node) {
                    Some(node) => {
                        let what = format!("Could not write LUKS header to '{}'", node.name());
                        run(&node, &what, async move |node| write(node, &bytes).await)
                    }
                    None => Ok(()),
                }
            }))
            .await;
            settle(made, [header, data]).await
        })
    }
}

/// Refuses what QEMU refuses, in its words. `end`: bytes that the node is to have.
fn check_preallocation(
    context: &CreateContext<'_>,
    file: Option<&str>,
    is_detached: bool,
    end: u64,
    how: Preallocation,
) -> Result<(), OpenError> {
    let Some(file) = file else {
        let why =
            "Parameter 'preallocation' requires 'file' to be specified for formatting LUKS disk";
        return match how {
            Preallocation::Off => Ok(()),
            _ => Err(OpenError::new(why)),
        };
    };
    let shrinks = context.node(file)?.geometry().size > end;
    match (how, is_detached) {
        (Preallocation::Metadata, true) => Err(OpenError::new("Operation not supported")),
        (Preallocation::Falloc | Preallocation::Full, true) if shrinks => {
            Err(OpenError::new("Operation not supported"))
        }
        (Preallocation::Falloc | Preallocation::Full, false) if shrinks => {
            Err(OpenError::new("Cannot use preallocation for shrinking files"))
        }
        _ => Ok(()),
    }
}

/// Writes to a node, on a temporary loop. `what`: what could not be done, after an error.
fn run(
    node: &Arc<dyn BlockNode>,
    what: &str,
    work: impl AsyncFnOnce(&Rc<dyn Channel>) -> Result<(), Errno> + 'static,
) -> Result<(), OpenError> {
    let failed = |errno: Errno| OpenError::os(what, errno);
    let of_io =
        |error: std::io::Error| failed(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw));
    let config = LoopConfig { name: "luks".into(), entries: 32, ..LoopConfig::default() };
    let event_loop = EventLoop::new(config).map_err(|error| of_io(error.error))?;
    let channel = node.clone().open_channel(&event_loop).map_err(of_io)?;
    let done = event_loop.block_on(async move { work(&channel).await });
    done.map_err(of_io)?.map_err(failed)
}

/// Allocates the space of the encrypted sectors, whose zeroes read as noise.
async fn allocate(
    channel: &Rc<dyn Channel>,
    range: Range<u64>,
    how: Preallocation,
) -> Result<(), Errno> {
    preallocate(channel, range, how).await?;
    flush(channel).await
}

/// Writes the header.
async fn write(channel: &Rc<dyn Channel>, header: &Secret) -> Result<(), Errno> {
    let mut bufs = memory(header.len())?;
    bufs.copy_in(0, header);
    submit(channel, Op::Write { fua: false }, 0, header.len() as u64, bufs).await.0?;
    flush(channel).await
}

async fn flush(channel: &Rc<dyn Channel>) -> Result<(), Errno> {
    submit(channel, Op::Flush, 0, 0, IoBufs::new()).await.0
}

/// Zeroes.
fn memory(len: usize) -> Result<IoBufs, Errno> {
    AlignedBuf::io_bufs(len, 4096).ok_or(Errno::ENOMEM)
}

#[derive(Default)]
struct Draft {
    file: Option<BlockdevRef>,
    header: Option<BlockdevRef>,
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
        Row::optional(
            "file",
            "only a header is made, in the node header",
            "the node that it is made in, over the node's contents",
        )
        .nested(ref_shape, |disk, node, at| put(&mut disk.file, Some(read_node(node, at)?))),
        Row::optional(
            "header",
            "the header lies before the encrypted data",
            "the node that the header is made in, over the node's contents",
        )
        .nested(ref_shape, |disk, node, at| put(&mut disk.header, Some(read_node(node, at)?))),
        Row::required("size", "size of the disk").bytes(|disk, size| put(&mut disk.size, size)),
        Draft::KEY_SECRET,
        Draft::CIPHER_ALG,
        Draft::CIPHER_MODE,
        Draft::IVGEN_ALG,
        Draft::IVGEN_HASH_ALG,
        Draft::HASH_ALG,
        Draft::ITER_TIME,
        Row::default("preallocation", "off", "how its space is allocated beforehand").at(&OneOf {
            at: |disk: &mut Draft| &mut disk.preallocation,
            words: &[
                ("off", Preallocation::Off, "nothing is allocated"),
                ("metadata", Preallocation::Metadata, "as off; not with a header node"),
                ("falloc", Preallocation::Falloc, "its space is reserved"),
                ("full", Preallocation::Full, "its space is written"),
            ],
        }),
        Field::unoffered("detached-header", only_off),
    ],
    build: |draft| {
        let Draft { file, header, size, mut luks, preallocation } = draft;
        luks.detached = header.is_some();
        Ok(Box::new(NewDisk { file, header, size, luks, preallocation }))
    },
};
