//! Opens and closes an image, on a temporary loop: before the image has channels, and after.

use std::ffi::OsStr;
use std::fs::File;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use event_loop::{EventLoop, LoopConfig};
use nix::errno::Errno;

use super::Qcow2Node;
use super::bitmaps::{self, ImageBitmaps, KeptBitmaps, Loaded};
use super::caches::CacheSizes;
use super::channel::Clean;
use super::context::Channels;
use super::core::read_kept;
use super::damage::Damages;
use super::details::Details;
use super::dirty::{self, DirtyImage};
use super::encrypt::EncryptedData;
use super::engine::{Contents, Engine, Owner};
use super::header::{self, Header, Purpose};
use super::image::{Image, errno_of};
use super::journal::{self, Elsewhere, Found, Journal, Journals, Superseded};
use super::marker::{self, Mark};
use super::metadata::Metadata;
use super::origin::Origin;
use super::release_for_handover::Releasing;
use super::scratch::Scratch;
use super::snapshots::{self, Snapshots};
use super::steps::{ENTRY, SECTOR, Sectors, number, read, write};
use super::storage::{Shared, sync};
use crate::drivers::common::check_writable;
use crate::drivers::encryption::Unlocked;
use crate::error::OpenError;
use crate::image_place::ImagePlace;
use crate::inherited::Inherited;
use crate::node::{BlockNode, Watchers};
use crate::options::{BlockdevOptions, Discard, Qcow2Options};
use crate::request::Part;

/// The nodes below an image.
#[derive(Clone)]
pub(crate) struct Below {
    /// `file`.
    pub(crate) file: Arc<dyn BlockNode>,
    /// `data-file`.
    pub(crate) data_file: Option<Arc<dyn BlockNode>>,
    /// `backing`.
    pub(crate) backing: Option<Arc<dyn BlockNode>>,
    /// The encryption of the guest's data.
    pub(super) encrypted: Option<Arc<EncryptedData>>,
}

/// The named children of an image, beside `file`.
#[derive(Default)]
pub(crate) struct Children {
    pub(crate) data_file: Option<Arc<dyn BlockNode>>,
    pub(crate) backing: Option<Arc<dyn BlockNode>>,
}

impl Below {
    /// Where the guest's data lies.
    pub(super) fn data(&self) -> &Arc<dyn BlockNode> {
        self.data_file.as_ref().unwrap_or(&self.file)
    }

    /// The end of the file. The node may have been open when an image made it longer.
    pub(super) fn file_end(&self) -> u64 {
        self.file.end().unwrap_or(0).max(self.file.geometry().size)
    }

    pub(super) fn open_channels(&self, event_loop: &EventLoop) -> io::Result<Channels> {
        let open = |node: &Arc<dyn BlockNode>| node.clone().open_channel(event_loop);
        let backing = |node| open(node).map(|channel| (channel, node.geometry().size));
        let file = open(&self.file)?;
        let data_file = self.data_file.as_ref().map(open).transpose()?;
        let data = data_file.as_ref().unwrap_or(&file);
        let data = match &self.encrypted {
            Some(encrypted) => encrypted.open_channel(event_loop, data),
            None => data.clone(),
        };
        Ok(Channels {
            event_loop: event_loop.clone(),
            data,
            is_encrypted: self.encrypted.is_some(),
            file,
            data_file,
            backing: self.backing.as_ref().map(backing).transpose()?,
            scratch: Scratch::default(),
            meter: event_loop.meter(),
        })
    }
}

/// Runs a task over the nodes below an image, on a thread and a loop of their own, and waits for it.
pub(super) fn run_apart<T, F>(
    below: &Below,
    task: impl FnOnce(Rc<Channels>) -> F + Send,
) -> io::Result<T>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + 'static,
{
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("qcow2".into());
        let ended = thread.spawn_scoped(scope, || on_a_loop(below, task))?.join();
        ended.map_err(|_| io::Error::other("the thread panicked"))?
    })
}

/// The same, on this thread.
pub(super) fn on_a_loop<T, F>(below: &Below, task: impl FnOnce(Rc<Channels>) -> F) -> io::Result<T>
where
    T: 'static,
    F: Future<Output = io::Result<T>> + 'static,
{
    let config = LoopConfig { name: "qcow2".into(), entries: 32, ..LoopConfig::default() };
    let event_loop = EventLoop::new(config).map_err(|error| error.error)?;
    let channels = Rc::new(below.open_channels(&event_loop)?);
    // Requests of the image itself wait for no limit: they are those of opening, closing and handing over.
    channels.all().for_each(|channel| channel.drain_begin());
    let result = event_loop.block_on(task(channels))?;
    event_loop.shut_down()?;
    result
}

fn failed(name: &str, what: &str, error: &io::Error) -> OpenError {
    OpenError::io(format!("Could not {what} qcow2 image of node '{name}'"), error)
}

/// The backing image that an image's header names, as options.
pub(crate) enum ImplicitBacking {
    /// There is none.
    None,
    /// The path, and the format if the header names it.
    File(PathBuf, Option<String>),
}

/// An image of which the header has been read.
pub(crate) struct Opening {
    file: Arc<dyn BlockNode>,
    /// Its first bytes.
    start: Vec<u8>,
    header: Header,
    read_only: bool,
    /// The image's journal, if another process is handing the image over.
    going_on: Option<GoingOn>,
    /// Present while another process hands the image over: nothing is written until this process
    /// owns the image.
    unowned: Option<Arc<AtomicBool>>,
    damages: Option<Damages>,
    /// An image that has to be repaired is not opened.
    repairs_apart: bool,
}

/// A journal from a process that hands the image over. If the hand-over fails, that process keeps the
/// journal.
struct GoingOn {
    file: File,
    /// Set once this process owns the image.
    owned: Arc<AtomicBool>,
}

impl Opening {
    /// Reads the header.
    pub(crate) fn begin(
        common: &BlockdevOptions,
        file: Arc<dyn BlockNode>,
    ) -> Result<Opening, OpenError> {
        let below = file.geometry();
        // No fallback to reading, as in QEMU: its driver opens the file for writing at once.
        if let Some(why) = file.why_read_only().filter(|_| !common.read_only) {
            return Err(why.with_hint("read-only=on opens the image for reading"));
        }
        check_writable(common, &file)?;
        let read_only = common.read_only || below.read_only;
        let start = read_start(&file)?;
        let header = Header::parse(&start, Purpose::of(read_only))?;
        Ok(Opening {
            file,
            start,
            header,
            read_only,
            going_on: None,
            unowned: None,
            damages: None,
            repairs_apart: false,
        })
    }

    /// Goes on with what another process has handed over, if the image is among that and not whole.
    pub(crate) fn with_inherited(self, inherited: &mut Inherited) -> Opening {
        let mark = self.header.mark.as_ref().filter(|_| !self.read_only && self.header.is_dirty);
        let file = mark.and_then(|(mark, _)| inherited.take_named(&journal::name(mark)));
        let going_on = file.map(|file| GoingOn { file, owned: inherited.owned().clone() });
        let unowned = inherited.is_shared().then(|| inherited.owned().clone());
        Opening { going_on, unowned, ..self }
    }

    /// Sets where damage is reported that is found while the image is in use.
    pub(crate) fn telling(self, damages: Option<Damages>) -> Opening {
        Opening { damages, ..self }
    }

    /// Has [`finish`](Self::finish) fail with a [`DirtyImage`], and not repair the image.
    pub(crate) fn repairing_apart(self, repairs_apart: bool) -> Opening {
        Opening { repairs_apart, ..self }
    }

    /// The backing image that the header names. `path`: that of the image.
    pub(crate) fn backing(&self, path: Option<&Path>) -> Result<ImplicitBacking, OpenError> {
        let Some(backing) = &self.header.backing else { return Ok(ImplicitBacking::None) };
        let file = match self.file.may_name_files() {
            true => beside(path, &backing.filename, "backing file")?,
            // Whatever it is: it is refused.
            false => PathBuf::from(&backing.filename),
        };
        Ok(ImplicitBacking::File(file, backing.format.clone()))
    }

    /// The external data file that the header names, as in QEMU relative to the working directory. `None`: the image has
    /// none.
    pub(crate) fn data_file(&self) -> Result<Option<PathBuf>, OpenError> {
        let Some(data_file) = &self.header.data_file else { return Ok(None) };
        match &data_file.filename {
            Some(filename) if filename.is_empty() => {
                Err(OpenError::new("The 'file' block driver requires a file name"))
            }
            Some(filename) => Ok(Some(file_named(filename, "data file")?.into())),
            None => Err(OpenError::new("'data-file' is required for this image")),
        }
    }

    /// Checks that a file which the header names may be opened. `what`: the option that names it otherwise.
    pub(crate) fn check_naming(&self, file: &Path, what: &str) -> Result<(), OpenError> {
        if self.file.may_name_files() {
            return Ok(());
        }
        let why = format!(
            "The image is on a web server, and names '{}': a header chooses no file and no server",
            file.display()
        );
        Err(OpenError::new(why).with_hint(format!(
            "'{what}' tells in options what to open, such as a node of driver https; backing=null leaves a backing \
             file out"
        )))
    }

    /// Whether the image has an external data file.
    pub(crate) fn has_data_file(&self) -> bool {
        self.header.data_file.is_some()
    }

    /// Whether the image is opened for reading only.
    pub(crate) fn read_only(&self) -> bool {
        self.read_only
    }

    /// Opens the image on the nodes below it.
    pub(crate) fn finish(
        self,
        name: String,
        common: &BlockdevOptions,
        options: &Qcow2Options,
        children: Children,
        unlocked: Option<Arc<Unlocked>>,
        journals: Option<&Journals>,
    ) -> Result<Qcow2Node, OpenError> {
        let Children { data_file, backing } = children;
        for sentence in options.unheeded.sentences() {
            log::warn!("qcow2 image of node '{name}': {sentence}");
        }
        if options.snapshot.is_some() && !self.read_only {
            let why = "A disk at a snapshot is for reading";
            return Err(OpenError::new(why).with_hint("read-only=on opens the image for reading"));
        }
        let Opening {
            file,
            mut start,
            mut header,
            read_only,
            going_on,
            unowned,
            damages,
            repairs_apart,
        } = self;
        if header.data_file_raw && !read_only && (backing.is_some() || header.backing.is_some()) {
            // Zeroes of the data file would hide it.
            let why = "Backing file and data-file-raw cannot be used at the same time";
            return Err(OpenError::new(why).with_hint("read-only=on opens the image for reading"));
        }
        options.unheeded.check(&header)?;
        let is_shared = unowned.is_some();
        if let Some(data_file) = &data_file
            && data_file.geometry().read_only
            && !read_only
        {
            return Err(OpenError::new(format!("Block node '{}' is read-only", data_file.name())));
        }
        if header.luks.is_some() && unlocked.is_none() {
            let why = "Parameter 'encrypt.key-secret' is required for cipher";
            let hint =
                "encrypt.format=luks,encrypt.key-secret=… names the secret with its password";
            return Err(OpenError::new(why).with_hint(hint));
        }
        let encrypted = unlocked.as_ref().map(|found| EncryptedData::new(found.cipher.clone()));
        let below = Below { file, data_file, backing, encrypted: encrypted.map(Arc::new) };
        below.file.enable_growth();
        below.data().enable_growth();
        let place = below.file.clone().host_storage().and_then(|storage| storage.place());
        let origin = Origin::judge(header.origin.as_deref(), &below, options)?;
        if !read_only && header.is_dirty && header.mark.is_none() {
            if is_shared {
                let error = io::Error::other("the process that hands it over has not marked it");
                return Err(failed(&name, "open", &error));
            }
            if repairs_apart {
                return Err(OpenError::dirty(DirtyImage::new(&name, below.file)));
            }
            dirty::repair(&name, below.file.clone(), &AtomicBool::new(false))?;
            start = read_start(&below.file)?;
            header = Header::parse(&start, Purpose::Write)?;
        }
        let (handed_over, owned) = going_on.map(|on| (on.file, on.owned)).unzip();
        let goes_on = owned.is_some();
        let (mut journal, left) =
            find_left(&name, &header, journals, handed_over, place.as_ref(), read_only)?;
        let superseded = match is_shared || goes_on {
            true => Vec::new(),
            false => find_superseded(&name, &header, journals, place.as_ref()),
        };
        let in_file = header.clone();
        let lacks = !left.is_empty();
        if lacks {
            // A journal may be rotten, and where tables are is in it, too.
            let (sectors, _) = start.as_chunks_mut::<SECTOR>();
            for (sector, number) in sectors.iter_mut().zip(0..) {
                left.get(&number).into_iter().for_each(|left| *sector = **left);
            }
            let with_left = Header::parse(&start, Purpose::of(read_only)).map_err(|error| {
                let error = io::Error::other(format!("its journal has a wrong header: {error}"));
                failed(&name, "recover", &error)
                    .with_hint("qemu-img check -r all has the image do without")
            })?;
            if read_only || goes_on {
                // It is seen as if it was there.
                header = with_left;
            }
        }
        let writes_now = !read_only && !goes_on && !is_shared;
        let device = place.as_ref().filter(|place| !place.is_device).map(|place| place.device);
        // Before the journal is made void.
        let found = journal.as_ref().filter(|_| writes_now);
        let left_bitmaps = found.map_or_else(Vec::new, |journal| journal.find_kept(device, false));
        if !read_only && !goes_on && header.mark.is_some() {
            if is_shared {
                let error = io::Error::other("the process that hands it over has marked it since");
                return Err(failed(&name, "open", &error));
            }
            let cleared = clear_up(&below, &header, left.clone(), journal.as_mut());
            cleared.map_err(|error| failed(&name, "recover", &error))?;
            header = Header::parse(&read_start(&below.file)?, Purpose::Write)?;
        }
        if writes_now && (header.loses_autoclear || header.has_stale_bitmaps) {
            end_autoclear(&name, &below, &header).map_err(|error| failed(&name, "open", &error))?;
        }
        if let Some(wanted) = &options.snapshot {
            let (found, wanted, end) = (header.clone(), wanted.clone(), below.file_end());
            let found = run_apart(&below, move |channels| async move {
                snapshots::header_at(&channels, &found, end, &wanted).await
            });
            header = found.map_err(|error| failed(&name, "open", &error))?;
        }
        let bitmaps = match header.bitmaps {
            Some(extension) => {
                let (header, end) = (header.clone(), below.file_end());
                run_apart(&below, move |channels| async move {
                    bitmaps::load(&channels, &header, extension, end, read_only, writes_now).await
                })
            }
            None => Ok(Loaded::default()),
        };
        let mut bitmaps = bitmaps.map_err(|error| failed(&name, "open", &error))?;
        if !read_only && journal.is_none() {
            match header.has_room {
                true => journal = create(&name, journals, place.as_ref()),
                false => bitmaps.tell_not_kept(
                    &name,
                    "its image has no room for a journal's mark, which needs clusters of 4096 bytes or more",
                ),
            }
        }
        if let (Some(journal), Some(place)) = (&journal, &place)
            && !read_only
            && !goes_on
            && let Err(error) = journal.set_place(place)
        {
            log::warn!(
                "qcow2 image of node '{name}': the journal does not name the image: {error}"
            );
        }
        let writes = journal.as_ref().filter(|_| !read_only);
        let lent = writes.filter(|_| goes_on).map(|journal| journal.find_kept(device, true));
        let keeper = writes.and_then(|journal| journal.keeper(device));
        if writes_now && journal.is_some() && keeper.is_none() {
            bitmaps.tell_not_kept(&name, bitmaps::NOT_IN_A_FILE);
        }
        let kept = KeptBitmaps::new(keeper, lent.unwrap_or_default());
        if writes_now {
            kept.take(&name, &mut bitmaps, left_bitmaps, header.size);
        }
        if writes_now && let Some(names) = bitmaps.inconsistent() {
            log::warn!(
                "dirty bitmaps of the qcow2 image of node '{name}' are inconsistent, as it was not closed or they are \
                 damaged: {names}; remove them, and begin with a full backup"
            );
        }
        let opened = {
            let caches = options.caches;
            let (header, below_too) = (header.clone(), below.clone());
            let node_name = name.clone();
            run_apart(&below, move |channels| async move {
                let metadata = match read_only {
                    true if left.is_empty() => None,
                    true => Some(Metadata::new(&header, &[]).with_left(left)),
                    false if goes_on => {
                        // The other process still owns the image: nothing is written, and no guest waits for
                        // the disk.
                        let metadata = metadata_in_file(&channels, &in_file).await?;
                        Some(metadata.with_left(left).with_journal(journal, true))
                    }
                    false => {
                        // An image that is still marked has this journal's mark.
                        let marked = header.is_dirty;
                        let metadata = read_metadata(&channels, &header, &below_too).await?;
                        Some(metadata.with_journal(journal, marked))
                    }
                };
                // If the end of the file is unknown, no part of the file counts as new.
                let end = below_too.file.end().unwrap_or(i64::MAX as u64);
                let file_end = below_too.file_end();
                let snapshots = match snapshots::read_all(&channels, &header, file_end).await {
                    Ok((all, table)) => Snapshots { all, table },
                    // Their tables are not changed, so it is no matter where they are.
                    Err(error) if read_only => {
                        log::warn!("qcow2 image of node '{node_name}': {error}");
                        Snapshots::default()
                    }
                    Err(error) => return Err(error),
                };
                let others = match read_only {
                    true => Vec::new(),
                    false => snapshots::places(&snapshots.all, snapshots.table.clone()),
                };
                let places = (others, caches, end);
                let engine =
                    engine(&channels, &header, metadata.as_ref(), places, read_only).await?;
                Ok((engine, Shared::new(metadata), snapshots))
            })
        };
        let (engine, shared, snapshots) = opened.map_err(|error| failed(&name, "open", &error))?;
        let unmap = common.discard == Discard::Unmap;
        // The image behind may be left out now and be there later: zeroes must hide it then.
        let has_backing = below.backing.is_some() || header.backing.is_some();
        let mut image = Image::new(engine, shared, &header, has_backing, read_only);
        image.snapshots = snapshots.into();
        if below.data_file.is_none() && below.file.geometry().request_alignment > 1 {
            image.extend_ahead();
        }
        if lacks && goes_on {
            image.changed();
        }
        if is_shared && !read_only {
            // The process that hands the image over leaves flushes to this one.
            image.shared.ended_write();
        }
        image.kept = kept;
        let image = Arc::new(image);
        if image.kept.any() {
            let marked = image.clone();
            let marked = run_apart(&below, move |channels| async move {
                marked.mark_now(&channels).await;
                Ok(())
            });
            marked.map_err(|error| failed(&name, "open", &error))?;
        }
        if writes_now {
            origin.record(&name, &image, &below);
        }
        image.kept.seize();
        if !read_only {
            superseded.into_iter().for_each(Superseded::remove);
        }
        let bitmaps =
            ImageBitmaps::new(name.clone(), below.clone(), image.clone(), bitmaps, unowned);
        Ok(Qcow2Node {
            image,
            bitmaps: Arc::new(bitmaps),
            details: Details::new(
                &start,
                &header,
                unlocked.as_ref().map(|found| found.slots.clone()),
            ),
            name,
            below,
            read_only,
            discard: common.discard,
            detect_zeroes: common.detect_zeroes,
            no_unref: options.discard_no_unref,
            watchers: Watchers::default(),
            letting_go: Releasing::default(),
            damages,
            owned,
            suspended: AtomicBool::new(false),
            _unlocked: unlocked,
            clean: Clean::every(options.caches.clean_interval),
            pass_discard: options.pass_discard_request.unwrap_or(unmap),
            pass_discard_snapshot: options.pass_discard_snapshot.unwrap_or(true),
        })
    }
}

/// Reads the tables that are always in memory. `places`: of metadata of snapshots, memory for tables, and the end of the file.
async fn engine(
    channels: &Channels,
    header: &Header,
    metadata: Option<&Metadata>,
    (mut others, caches, end): (Vec<(Range<u64>, Owner)>, CacheSizes, u64),
    read_only: bool,
) -> io::Result<Engine> {
    let table =
        |part, (at, len): (u64, u64)| read_kept(channels, metadata, (part, at), len as usize);
    let start = table(Part::Other, (0, SECTOR as u64)).await?;
    let l1 = table(Part::L1, header.l1_table).await?;
    let refcounts = match read_only {
        true => Vec::new(),
        false => table(Part::RefcountTable, header.refcount_table).await?,
    };
    others.extend(header.luks.clone().map(|place| (place, Owner::LuksHeader)));
    if let Some(bitmaps) = &header.bitmaps {
        let (at, len) = bitmaps.directory;
        others.push((at..at + len, Owner::BitmapDirectory));
    }
    let contents = Contents {
        start: *start.first_chunk().ok_or(Errno::EIO)?,
        header,
        l1: &l1,
        refcounts: &refcounts,
        others: &others,
        caches,
        // What another process has left and is not in the file yet may lie beyond.
        end: end.max(metadata.map_or(0, Metadata::end)),
        read_only,
    };
    Engine::new(&contents).map_err(|stop| match stop.damage() {
        Some(why) => io::Error::new(io::ErrorKind::InvalidData, why),
        None => Errno::EIO.into(),
    })
}

/// Finds the metadata that another process has left in a journal, and the journal.
///
/// The other process was killed, or hands the image over with the journal `handed_over`.
pub(super) fn find_left(
    name: &str,
    header: &Header,
    journals: Option<&Journals>,
    handed_over: Option<File>,
    place: Option<&ImagePlace>,
    read_only: bool,
) -> Result<(Option<Journal>, Sectors), OpenError> {
    let nothing = Ok((None, Sectors::new()));
    let Some((mark, as_of)) = &header.mark else { return nothing };
    if !header.is_dirty {
        // Nothing was committed, or all of it is in the image: a process was killed as it marked the image, or unmarked it.
        if let Some(journals) = journals.filter(|_| !read_only)
            && let Ok(Found::Left(Some(journal), _)) = journals.find(mark, *as_of, place, false)
        {
            if journal.is_needed() {
                tell_superseded(name, mark);
            }
            journal.remove();
        }
        return nothing;
    }
    if handed_over.is_none() && !mark.is_of_this_boot() {
        log::warn!(
            "qcow2 image of node '{name}' was not closed, before a power cut or on another machine: it is as \
             it was last flushed, or later"
        );
        return nothing;
    }
    let is_handed_over = handed_over.is_some();
    let found = match (journals, handed_over) {
        (Some(journals), Some(file)) => journals.look_into(file, mark, *as_of, place, read_only),
        (Some(journals), None) => journals.find(mark, *as_of, place, read_only),
        (None, _) => Ok(Found::Nothing),
    };
    let mut found = found.map_err(|error| failed(name, "recover", &error))?;
    if let (Found::Nothing, false, Some(journals)) = (&found, is_handed_over, journals) {
        found = find_elsewhere(name, journals, mark, *as_of, place, read_only)?;
    }
    match found {
        Found::Left(journal, left) => {
            if read_only && !is_handed_over && !left.is_empty() {
                log::warn!(
                    "qcow2 image of node '{name}': a process that had it open was killed, and the node is read-only: what \
                     that process had not written to the image is read from its journal {mark}, and stays there. 'ringmill \
                     check --repair all' writes it to the image, which other programs need"
                );
            }
            Ok((journal, left))
        }
        // Its owner has the image open, or is yet to open it, and it is looked at all the same.
        Found::InUse | Found::OfAnother(_) if read_only => nothing,
        Found::OfAnother(original) => {
            let original = original.filter(|path| !path.as_os_str().is_empty());
            let original = original
                .map_or_else(|| "another image".to_owned(), |path| format!("'{}'", path.display()));
            let why = format!(
                "this is a copy of {original}, and the journal {mark} has what a killed process had not written to that image"
            );
            Err(failed(name, "recover", &io::Error::other(why)).with_hint(
                "open that image first; without the journal, qemu-img check -r all repairs the copy",
            ))
        }
        Found::InUse => {
            let error = io::Error::other("another process has its journal");
            Err(failed(name, "recover", &error).with_hint(
                "of a copy made of an image in use, qemu-img check -r all makes one by itself",
            ))
        }
        Found::Nothing if is_handed_over => {
            let error = io::Error::other("there is no use for the journal that was handed over");
            Err(failed(name, "recover", &error))
        }
        Found::Nothing => {
            log::error!(
                "qcow2 image of node '{name}' was not closed, and its journal {mark} is missing: what was \
                 written to new clusters since the last flush is lost"
            );
            nothing
        }
    }
}

/// Finds the journal of an image in another folder than that of this process: a daemon of another user or service has had
/// the image open.
fn find_elsewhere(
    name: &str,
    journals: &Journals,
    mark: &Mark,
    as_of: u64,
    place: Option<&ImagePlace>,
    read_only: bool,
) -> Result<Found, OpenError> {
    let found = journals.find_elsewhere(mark, as_of, place, read_only);
    let (folder, why) = match found.map_err(|error| failed(name, "recover", &error))? {
        Elsewhere::Nowhere => return Ok(Found::Nothing),
        Elsewhere::Found(folder, found) => {
            if let Found::Left(Some(_), _) = &found {
                log::warn!(
                    "qcow2 image of node '{name}': its journal {mark} was in '{}', the folder of another daemon, and \
                     is moved to this one's",
                    folder.display()
                );
            }
            return Ok(found);
        }
        Elsewhere::Refused(folder, why) => (folder, why),
    };
    let folder = folder.display();
    if read_only {
        log::error!(
            "qcow2 image of node '{name}' was not closed, and its journal {mark} in '{folder}' cannot be read: {why}: \
             what was written to new clusters since the last flush is not seen"
        );
        return Ok(Found::Nothing);
    }
    let error = io::Error::other(format!(
        "what a killed process had not written to it is in the journal {mark}, in the folder '{folder}': {why}"
    ));
    Err(failed(name, "recover", &error).with_hint(
        "start ringmill, or run ringmill check --repair all, as that process' user and with its RUNTIME_DIRECTORY; \
         qemu-img check -r all has the image do without",
    ))
}

/// Finds journals of an image that names another one, or none, and reports those with changes: another program has
/// changed the image in between.
pub(super) fn find_superseded(
    name: &str,
    header: &Header,
    journals: Option<&Journals>,
    place: Option<&ImagePlace>,
) -> Vec<Superseded> {
    let (Some(journals), Some(place)) = (journals, place) else { return Vec::new() };
    let named = header.mark.as_ref().map(|(mark, _)| mark);
    let found = journals.superseded(place, named).unwrap_or_else(|error| {
        log::warn!("qcow2 image of node '{name}': looking for journals failed: {error}");
        Vec::new()
    });
    let needed = found.iter().filter(|journal| journal.is_needed);
    needed.for_each(|journal| tell_superseded(name, &journal.mark));
    found
}

fn tell_superseded(name: &str, mark: &Mark) {
    log::error!(
        "qcow2 image of node '{name}' was changed without its journal {mark}, by another program or with another folder \
         of journals, after a process was killed that had the image open: what that process had written to new clusters \
         since the last flush is lost"
    );
}

/// Clears autoclear features that the driver does not maintain, before data changes.
fn end_autoclear(name: &str, below: &Below, header: &Header) -> io::Result<()> {
    if header.has_stale_bitmaps {
        log::warn!(
            "qcow2 image of node '{name}': a program lacking bitmap support modified this file, so all bitmaps \
             are now considered inconsistent, and are ignored; begin with a full backup, and qemu-img check -r \
             leaks frees their space"
        );
    }
    let kept = header.kept_autoclear();
    run_apart(
        below,
        move |channels| async move { Ok(marker::write_autoclear(&channels, kept).await?) },
    )
}

/// A new journal, if there can be one.
fn create(name: &str, journals: Option<&Journals>, place: Option<&ImagePlace>) -> Option<Journal> {
    match journals?.create(place) {
        Ok(journal) => Some(journal),
        Err(error) => {
            log::warn!(
                "qcow2 image of node '{name}' has no journal: {error}. Writes to new clusters wait for the \
                 disk"
            );
            None
        }
    }
}

/// Writes what was left to the image, as a flush would have done, and makes the journal void. Without one, the
/// image is not marked any more.
pub(super) fn clear_up(
    below: &Below,
    header: &Header,
    left: Sectors,
    journal: Option<&mut Journal>,
) -> io::Result<()> {
    let header = header.clone();
    let mark = journal.as_ref().map(|journal| journal.mark().sector(journal.next()));
    run_apart(below, move |channels| async move {
        let Some(mark) = mark else {
            return Ok(marker::unmark(&channels, header.cluster).await?);
        };
        if !left.is_empty() {
            let metadata = metadata_in_file(&channels, &header).await?.with_left(left);
            metadata.begin().0.carry_out(&channels).await?;
            sync(&channels).await?;
        }
        let at = Mark::place(header.cluster).ok_or(Errno::EIO)?;
        Ok(write(&channels, at, &mark)?.await.0?)
    })?;
    journal.map_or(Ok(()), Journal::make_void)
}

/// As much of an image as its header takes.
pub(super) fn read_start(file: &Arc<dyn BlockNode>) -> Result<Vec<u8>, OpenError> {
    let start = first_bytes(file, header::USUAL)?;
    match header::to_read(&start) {
        ..=header::USUAL => Ok(start),
        more => first_bytes(file, more),
    }
}

/// Where the metadata is that the file has.
async fn metadata_in_file(channels: &Channels, header: &Header) -> Result<Metadata, Errno> {
    let (offset, len) = header.refcount_table;
    let table = read(channels, offset, len as usize).await?;
    Ok(Metadata::new(header, &table))
}

/// Like [`metadata_in_file`], for an unchecked image that will be written.
///
/// The search for a free cluster visits all blocks in the refcount table, and does not yield while they are
/// in memory. To bound the search, the table must not name a block twice, or a block past the end of the
/// file. Then the table names at most as many blocks as the file has clusters.
async fn read_metadata(
    channels: &Channels,
    header: &Header,
    below: &Below,
) -> io::Result<Metadata> {
    let (offset, len) = header.refcount_table;
    let size = below.file_end();
    let table = read(channels, offset, len as usize).await?;
    let entries = table.chunks_exact(ENTRY).map(number);
    let mut blocks: Vec<u64> = entries.collect();
    // Without a reference to the header's own cluster, the search for a free cluster would never
    // end.
    let first = blocks.first().copied().filter(|first| *first != 0 && *first < size);
    let count = match first {
        Some(first) => read(channels, first, ENTRY).await?,
        None => Vec::new(),
    };
    let is_counted = match header.refcount_bits {
        bits @ ..8 => count.first().is_some_and(|byte| byte & ((1 << bits) - 1) != 0),
        bits => count.iter().take(bits as usize / 8).any(|byte| *byte != 0),
    };
    blocks.retain(|block| *block != 0);
    blocks.sort_unstable();
    let twice = blocks.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
    let beyond = blocks.last().copied().filter(|last| *last >= size);
    let uncounted = (!is_counted).then_some(first.unwrap_or_default());
    match twice.or(beyond).or(uncounted) {
        Some(block) => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "the refcount table has a wrong entry, {block:#x}: ringmill check --repair all"
            ),
        )),
        None => Ok(Metadata::new(header, &table)),
    }
}

/// Reads the first bytes of a node, as many as it has.
fn first_bytes(file: &Arc<dyn BlockNode>, most: usize) -> Result<Vec<u8>, OpenError> {
    let below = Below { file: file.clone(), data_file: None, backing: None, encrypted: None };
    let len = file.geometry().size.min(most as u64) as usize;
    let bytes =
        run_apart(&below, move |channels| async move { Ok(read(&channels, 0, len).await?) });
    let failed = |error: io::Error| OpenError::os("Could not read image's header", errno_of(error));
    bytes.map_err(failed)
}

/// Whether a node's contents are an image in this format.
pub(crate) fn probe(file: &Arc<dyn BlockNode>) -> Result<bool, OpenError> {
    Ok(header::is_qcow2(&first_bytes(file, 512)?))
}

/// The path in a name in a header. Fails if the name is not that of a file.
fn file_named<'a>(name: &'a OsStr, what: &str) -> Result<&'a OsStr, OpenError> {
    let bytes = name.as_bytes();
    let prefixes: [&[u8]; 2] = [b"file:", b"host_device:"];
    let path = prefixes.iter().find_map(|prefix| bytes.strip_prefix(*prefix)).unwrap_or(bytes);
    // QEMU's rule: a protocol is the text before the first colon, if no slash comes earlier.
    let first = path.iter().find(|byte| matches!(byte, b':' | b'/'));
    if first == Some(&b':') {
        let name = OsStr::from_bytes(path).display();
        return Err(OpenError::new(format!("The image's {what}, '{name}', is not a file"))
            .with_hint(
                format!("'{what}' tells in options how to open it").replace(" file'", "'"),
            ));
    }
    Ok(OsStr::from_bytes(path))
}

/// A name in a header, seen from where the image lies.
fn beside(image: Option<&Path>, name: &OsStr, what: &str) -> Result<PathBuf, OpenError> {
    let name = Path::new(file_named(name, what)?);
    match image.and_then(Path::parent) {
        Some(directory) => Ok(directory.join(name)),
        None if name.is_absolute() => Ok(name.into()),
        None => Err(OpenError::new(format!(
            "The image's {what}, '{}', is relative to the image, which is not a file",
            name.display()
        ))),
    }
}

/// Writes all metadata and dirty bitmaps in memory to the image, and leaves nothing in the journal.
pub(super) fn close(name: &str, below: &Below, image: &Arc<Image>, bitmaps: &Arc<ImageBitmaps>) {
    let closed = match image.is_whole() && !image.shared.is_unflushed() && bitmaps.are_whole() {
        // An unchanged image is closed without a loop.
        true => Ok(()),
        false => {
            let (name, image, bitmaps) = (name.to_owned(), image.clone(), bitmaps.clone());
            run_apart(below, move |channels| async move {
                if let Err(errno) = bitmaps.store(&channels).await {
                    log::error!(
                        "storing the dirty bitmaps of the qcow2 image of node '{name}' failed: {}; those that the \
                         image had are inconsistent from now on, new ones are lost: remove the former, and begin \
                         with a full backup",
                        errno.desc()
                    );
                }
                Ok(image.close(&channels).await?)
            })
        }
    };
    match closed {
        Ok(()) => image.drop_journal(),
        Err(error) => {
            let means = match image.has_journal() && image.is_committed() {
                true => {
                    "the journal has the changes that the image lacks: before this machine restarts, open the \
                     image again by ringmill, and by no other program"
                }
                false => "what was written since the last flush may be lost",
            };
            log::error!("{}; {means}", failed(name, "close", &error));
        }
    }
}
