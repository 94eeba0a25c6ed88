//! Checks and repairs an image that is not in use: the file of a [`Check`].

use std::fmt;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_loop::{EventLoop, LoopConfig};

use super::bitmaps;
use super::context::Channels;
use super::engine::{Check, CheckError, Checked, CheckedFile, Places, Repair};
use super::header::{Header, Purpose};
use super::journal::{Journals, Superseded};
use super::marker;
use super::open::{Below, clear_up, find_left, find_superseded, read_start};
use super::snapshots;
use super::steps::{SECTOR, Sectors, numbers, read_up_to, write};
use super::storage::sync;
use crate::drivers::file::{Claims, FileNode, Kind};
use crate::error::OpenError;
use crate::inherited::Inherited;
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, Driver, FileOptions, Locking};
use crate::own_mounts::OwnMounts;

/// Most bytes per write.
const AT_ONCE: usize = 1 << 20;
/// The name of the node in messages.
const NODE: &str = "#check";

/// Why a check gave no result.
#[derive(Debug)]
pub enum CheckFailure {
    /// The image cannot be opened.
    Open(OpenError),
    /// The file is not a qcow2 image, and its format has no metadata that can be checked.
    NoChecks,
    /// The image cannot be read or written, or the repair of leaks alone is not possible.
    Io(io::Error),
}

impl From<io::Error> for CheckFailure {
    fn from(error: io::Error) -> CheckFailure {
        CheckFailure::Io(error)
    }
}

impl From<CheckError> for CheckFailure {
    fn from(error: CheckError) -> CheckFailure {
        CheckFailure::Io(match error {
            CheckError::Io(error) => error,
            CheckError::NeedsRebuild => nix::errno::Errno::EIO.into(),
            CheckError::TooLarge => nix::errno::Errno::EFBIG.into(),
        })
    }
}

/// Checks the qcow2 image at `path`, a file or a block device, and repairs it.
///
/// Blocks until the repair is on stable storage. `journals`: the folder with what killed processes have left, and
/// its owner.
///
/// # Errors
///
/// The image cannot be opened, is in use, or cannot be read or written.
pub fn check_qcow2(
    path: &Path,
    repair: Repair,
    journals: Option<(&Path, u32)>,
    tell: impl FnMut(fmt::Arguments<'_>) + Send,
) -> Result<Checked, CheckFailure> {
    // This process exports nothing.
    let (mounts, inherited) = (OwnMounts::default(), &mut Inherited::default());
    let kind = Kind::of(path, &mounts);
    let file = FileOptions { filename: path.to_owned(), aio: None, locking: Locking::Auto };
    let common = BlockdevOptions {
        read_only: repair == Repair::None,
        ..BlockdevOptions::new(None, Driver::of_kind(file.clone(), &mounts))
    };
    let node = FileNode::open(NODE.into(), kind, &common, &file, &mounts, inherited)
        .map_err(CheckFailure::Open)?;
    // This process is the node's user.
    if let Some(lock) = node.lock() {
        lock.change(Claims::of_disk(common.read_only)).map_err(CheckFailure::Open)?;
    }
    let node: Arc<dyn BlockNode> = Arc::new(node);
    if !super::probe(&node).map_err(CheckFailure::Open)? {
        return Err(CheckFailure::NoChecks);
    }
    // Without the folder, writes of a killed process that it would have are lost, as with qemu-img.
    let journals = journals
        .filter(|(folder, _)| folder.is_dir())
        .and_then(|(folder, user)| Journals::in_folder(folder, user).ok());
    check_node(NODE, node, repair, journals.as_ref(), &AtomicBool::new(false), tell)
}

/// Checks the image in a node. `stop`: the check fails at its next access to the file.
pub(super) fn check_node(
    name: &str,
    file: Arc<dyn BlockNode>,
    repair: Repair,
    journals: Option<&Journals>,
    stop: &AtomicBool,
    tell: impl FnMut(fmt::Arguments<'_>) + Send,
) -> Result<Checked, CheckFailure> {
    let parse = |file: &Arc<dyn BlockNode>| {
        let start = read_start(file)?;
        Header::parse(&start, Purpose::Check)
    };
    let mut header = parse(&file).map_err(CheckFailure::Open)?;
    let writes = repair != Repair::None;
    // Also has reads past the end succeed.
    file.enable_growth();
    let place = file.clone().host_storage().and_then(|storage| storage.place());
    let (mut journal, mut left) = find_left(name, &header, journals, None, place.as_ref(), !writes)
        .map_err(CheckFailure::Open)?;
    let superseded = find_superseded(name, &header, journals, place.as_ref());
    if writes {
        superseded.into_iter().for_each(Superseded::remove);
    }
    let below = Below { file, data_file: None, backing: None, encrypted: None };
    if writes && let Some((mark, _)) = &header.mark {
        if header.is_dirty && journal.is_none() && mark.is_of_this_boot() {
            let why =
                format!("the journal {mark} of the daemon that had the image open is not found");
            return Err(CheckFailure::Open(OpenError::new(why).with_hint(
                "run the check as the daemon's user, with its RUNTIME_DIRECTORY; 'qemu-img check -r all' has the image \
                 do without writes since the last flush",
            )));
        }
        clear_up(&below, &header, std::mem::take(&mut left), journal.as_mut())?;
        if let Some(journal) = journal {
            clear_up(&below, &header, Sectors::new(), None)?;
            journal.remove();
        }
        header = parse(&below.file).map_err(CheckFailure::Open)?;
    }
    run(&below, header, repair, left, stop, tell)
}

/// Runs a check on a thread and a loop of its own, and waits for it.
fn run(
    below: &Below,
    header: Header,
    repair: Repair,
    left: Sectors,
    stop: &AtomicBool,
    mut tell: impl FnMut(fmt::Arguments<'_>) + Send,
) -> Result<Checked, CheckFailure> {
    std::thread::scope(|scope| {
        let check = || {
            let config = LoopConfig { name: "check".into(), entries: 32, ..LoopConfig::default() };
            let event_loop = EventLoop::new(config).map_err(|error| error.error)?;
            let channels = Rc::new(below.open_channels(&event_loop)?);
            let len = below.file_end();
            let mut image = Image { event_loop, channels, left, len, stop };
            let checked = image.check(&header, repair, &mut tell);
            let Image { event_loop, channels, .. } = image;
            drop(channels);
            event_loop.shut_down()?;
            checked
        };
        let thread = std::thread::Builder::new().name("check".into());
        let ended = thread.spawn_scoped(scope, check)?.join();
        ended.map_err(|_| io::Error::other("the thread panicked"))?
    })
}

/// The file of an image.
struct Image<'a> {
    event_loop: EventLoop,
    channels: Rc<Channels>,
    /// What a killed process has not written, of an image that is only looked at.
    left: Sectors,
    len: u64,
    stop: &'a AtomicBool,
}

impl Image<'_> {
    fn check(
        &mut self,
        header: &Header,
        repair: Repair,
        tell: &mut (dyn FnMut(fmt::Arguments<'_>) + Send),
    ) -> Result<Checked, CheckFailure> {
        let places = self.places(header)?;
        let checked = Check::new(header, &places, repair, self, tell).run()?;
        if repair != Repair::None && checked.corruptions == 0 && checked.check_errors == 0 {
            self.mark_clean()?;
        }
        Ok(checked)
    }

    /// Where metadata lies that tables do not lead to.
    fn places(&mut self, header: &Header) -> io::Result<Places> {
        let (channels, header) = (self.channels.clone(), header.clone());
        let len = self.len;
        self.event_loop.block_on(async move {
            let mut places = Places { luks: header.luks.clone(), ..Places::default() };
            snapshots::list(&channels, &header, len, &mut places).await?;
            if let Some(extension) = header.bitmaps {
                bitmaps::list(&channels, &header, extension, len, &mut places).await?;
            }
            Ok(places)
        })?
    }

    /// Clears the bits that say that the image needs repair.
    fn mark_clean(&mut self) -> io::Result<()> {
        let channels = self.channels.clone();
        self.event_loop.block_on(async move {
            marker::write_clean(&channels).await?;
            Ok(sync(&channels).await?)
        })?
    }
}

impl CheckedFile for Image<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(nix::errno::Errno::ECANCELED.into());
        }
        let (channels, end) = (self.channels.clone(), self.len);
        let read = async move { read_up_to(&channels, end, at, len).await };
        let mut bytes = self.event_loop.block_on(read)??;
        if !self.left.is_empty() {
            let end = at + len as u64;
            for (number, sector) in self.left.range(numbers(&(at..end))) {
                let start = number * SECTOR as u64;
                for (byte, place) in sector.iter().zip(start..) {
                    if let Some(to) =
                        place.checked_sub(at).and_then(|at| bytes.get_mut(at as usize))
                    {
                        *to = *byte;
                    }
                }
            }
        }
        Ok(bytes)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        for (bytes, at) in bytes.chunks(AT_ONCE).zip((at..).step_by(AT_ONCE)) {
            let (channels, owned) = (self.channels.clone(), bytes.to_vec());
            self.event_loop.block_on(async move { write(&channels, at, &owned)?.await.0 })??;
        }
        self.len = self.len.max(at + bytes.len() as u64);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let channels = self.channels.clone();
        Ok(self.event_loop.block_on(async move { sync(&channels).await })??)
    }
}
