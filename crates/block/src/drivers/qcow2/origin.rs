//! An overlay of an image on a server: the header records the content that the overlay belongs to.
//!
//! A server may have another content under the same URL tomorrow. The overlay has some blocks, and leaves the others to its
//! backing image: the disk would be a mixture of two contents.
//!
//! Once it has all blocks (`block-stream`), the header records that it has no such image any more.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use super::header::{Header, Purpose};
use super::header_layout::Change;
use super::image::Image;
use super::open::{Below, run_apart};
use crate::error::OpenError;

/// The longest content that is recorded, bytes: the header has to fit into a sector.
const LONGEST: usize = 160;
/// Recorded in place of a content, once the image has no backing image any more.
pub(super) const DETACHED: &str = "none: it has no backing image any more";
/// Bytes that begin a file, with the header.
const HEADER: u64 = 64 << 10;

/// Returns whether a file is a qcow2 image that was an overlay of an image on a server, and has no backing image any more.
///
/// # Errors
///
/// Those of reading the file.
pub fn is_detached(path: &Path) -> io::Result<bool> {
    let mut start = Vec::new();
    File::open(path)?.take(HEADER).read_to_end(&mut start)?;
    let header = Header::parse(&start, Purpose::of(true));
    Ok(header
        .is_ok_and(|header| header.backing.is_none() && header.origin.as_deref() == Some(DETACHED)))
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
    /// Compares the content of the backing image with the `recorded` one. `accepts`: another one is recorded from now on.
    pub(super) fn judge(
        recorded: Option<&str>,
        below: &Below,
        accepts: bool,
    ) -> Result<Origin, OpenError> {
        let now = below.backing.as_ref().and_then(|backing| backing.content());
        let Some(now) = now.filter(|now| now.len() <= LONGEST) else { return Ok(Origin::Keep) };
        match recorded {
            Some(recorded) if recorded == now => Ok(Origin::Keep),
            Some(DETACHED) if !accepts => {
                let why = "The image had a backing image on a server, and has none any more";
                Err(OpenError::new(why).with_hint("backing=null leaves the backing image out"))
            }
            Some(recorded) if !accepts => {
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
