//! An overlay of an image on a server: the header records the content that the overlay belongs to.
//!
//! A server may have another content under the same URL tomorrow. The overlay has some blocks, and leaves the others to its
//! backing image: the disk would be a mixture of two contents.

use std::sync::Arc;

use super::header_layout::Change;
use super::image::Image;
use super::open::{Below, run_apart};
use crate::error::OpenError;

/// The longest content that is recorded, bytes: the header has to fit into a sector.
const LONGEST: usize = 160;

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
