//! An overlay of an image on a server: the header records the content that the overlay belongs to.
//!
//! A server may have another content under the same URL tomorrow. The overlay has some blocks, and leaves the others to its
//! backing image: the disk would be a mixture of two contents.
//!
//! Once it has all blocks (`block-stream`), the header records that it has no such image any more.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use super::header::{Header, Purpose};
use super::header_layout::Change;
use super::image::Image;
use super::open::{Below, run_apart};
use super::options::{Backing, Qcow2Options};
use crate::error::OpenError;

/// The longest content that is recorded, bytes: the header has to fit into a sector.
const LONGEST: usize = 160;
/// Recorded in place of a content, once the image has no backing image any more.
pub(super) const DETACHED: &str = "none: it has no backing image any more";
/// Bytes that begin a file, with the header.
const HEADER: u64 = 64 << 10;

/// A qcow2 file as the overlay of an image on a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlayFile {
    /// It belongs to a content, and lacks parts of it.
    Begun,
    /// It was one, and has all parts. It has no backing image any more.
    Whole,
    /// It has stored nothing yet, and its header names no backing file.
    Empty,
    /// It is an independent disk, or the overlay of a file: what is behind it may not be replaced.
    Other,
}

impl OverlayFile {
    /// Returns the content that the header of a file records. `None`: it records none, or is no header of an image.
    ///
    /// # Errors
    ///
    /// Those of reading the file.
    pub fn content(path: &Path) -> io::Result<Option<String>> {
        let mut start = Vec::new();
        File::open(path)?.take(HEADER).read_to_end(&mut start)?;
        Ok(Header::parse(&start, Purpose::of(true)).ok().and_then(|header| header.origin))
    }

    /// Looks at the header of a file, and at the table in it that has all that is stored.
    ///
    /// # Errors
    ///
    /// Those of reading the file. One that is no valid image is [`Other`](Self::Other).
    pub fn of(path: &Path) -> io::Result<OverlayFile> {
        let file = File::open(path)?;
        let mut start = Vec::new();
        (&file).take(HEADER).read_to_end(&mut start)?;
        let Ok(header) = Header::parse(&start, Purpose::of(true)) else {
            return Ok(OverlayFile::Other);
        };
        Ok(match (header.backing, header.origin.as_deref()) {
            (Some(_), _) => OverlayFile::Other,
            (None, Some(DETACHED)) => OverlayFile::Whole,
            (None, Some(_)) => OverlayFile::Begun,
            (None, None) if header.data_file.is_some() || header.snapshots.1 > 0 => {
                OverlayFile::Other
            }
            (None, None) => {
                let (at, len) = header.l1_table;
                match is_zero(&file, at, len)? {
                    true => OverlayFile::Empty,
                    false => OverlayFile::Other,
                }
            }
        })
    }
}

/// Returns whether a part of a file is there and has only zeroes.
fn is_zero(file: &File, at: u64, len: u64) -> io::Result<bool> {
    let mut rest = file;
    rest.seek(SeekFrom::Start(at))?;
    let (mut rest, mut piece) = (rest.take(len), Vec::new());
    loop {
        piece.clear();
        if (&mut rest).take(HEADER).read_to_end(&mut piece)? == 0 {
            return Ok(rest.limit() == 0);
        }
        if piece.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
}

/// What the opening of an image does about the content of its backing image.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Nothing: it is the recorded one, or is not known.
    Keep,
    /// It is recorded.
    Record(String),
}

impl Origin {
    /// Compares the content of the backing image with the `recorded` one.
    pub(super) fn judge(
        recorded: Option<&str>,
        below: &Below,
        options: &Qcow2Options,
    ) -> Result<Origin, OpenError> {
        if let (Some(recorded), None, Backing::Implicit) =
            (recorded, &below.backing, &options.backing)
            && recorded != DETACHED
        {
            let why = format!(
                "The image is an unfinished overlay of an image of {recorded} on a server: without that, its missing parts \
                 would read as zeroes"
            );
            return Err(OpenError::new(why).with_hint(
                "ringmill serve URL --overlay FILE opens both, as does backing=NODE of driver qcow2; backing=null opens the \
                 overlay alone",
            ));
        }
        let now = below.backing.as_ref().and_then(|backing| backing.content());
        let Some(now) = now.filter(|now| now.len() <= LONGEST) else { return Ok(Origin::Keep) };
        match recorded {
            Some(recorded) if recorded == now => Ok(Origin::Keep),
            Some(DETACHED) if !options.backing_changed => {
                let why = "The image had a backing image on a server, and has none any more";
                Err(OpenError::new(why).with_hint("backing=null leaves the backing image out"))
            }
            Some(recorded) if !options.backing_changed => {
                let why = format!(
                    "The overlay belongs to an image of {recorded}, and its backing image on the server is one of {now}"
                );
                Err(OpenError::new(why).with_hint(
                    "make a new overlay; if only the server's description of the image has changed, backing-changed=on of \
                     driver qcow2 accepts it",
                ))
            }
            Some(_) | None => Ok(Origin::Record(now)),
        }
    }

    /// Records the content in the header of an image that is open for writing.
    pub(super) fn record(self, name: &str, image: &Arc<Image>, below: &Below) {
        let Origin::Record(content) = self else { return };
        let image = image.clone();
        let recorded = run_apart(below, move |channels| async move {
            let change = Change { origin: Some(&content), ..Change::default() };
            image.change_header(&channels, &change).await?;
            Ok(image.flush(&channels).await?)
        });
        if let Err(error) = recorded {
            log::warn!(
                "qcow2 image of node '{name}': the content of its backing image cannot be recorded: {error}: a change on \
                 the server would not be noticed at the next opening"
            );
        }
    }
}
