//! Looks at an image before there is a daemon: its format, and the size of its disk.

use tokio::runtime::Builder;

use super::node::SECTOR;
use super::source::Source;
use crate::connections::Credentials;
use crate::error::OpenError;
use crate::format::{Format, LOOKED_AT};
use crate::options::UrlOptions;

/// Where a qcow2 header has the size of the disk, in bytes.
const QCOW2_SIZE: std::ops::Range<usize> = 24..32;

/// What an image on a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbedUrl {
    /// The format, by the first and last bytes. `None`: raw, as far as signatures show.
    pub format: Option<Format>,
    /// Bytes of its disk.
    pub size: u64,
    /// What an overlay records of the content.
    pub content: String,
    /// How the content is told from others under the same URL.
    pub told_by: ToldBy,
}

/// What tells contents under one URL from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToldBy {
    /// An ETag that is the same for equal bytes only.
    Etag,
    /// The time of the last change.
    Time,
    /// The length alone.
    Length,
}

/// Returns what an image on a web server is. Blocks until the server has answered. No thread is left behind.
///
/// # Errors
///
/// Those of opening a node.
pub fn probe_url(image: &UrlOptions, credentials: &Credentials) -> Result<ProbedUrl, OpenError> {
    let access = image.access(credentials)?;
    let failed = |error| OpenError::new(format!("thread http: {error}"));
    let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(async {
        let source = Source::open(access).await?;
        let len = source.identity().len;
        let part = LOOKED_AT as u64;
        let read = async |range: std::ops::Range<u64>| {
            if range.is_empty() {
                return Ok(Vec::new());
            }
            let answer = source.read(&range).await.map_err(|failure| {
                OpenError::new(format!("Could not read '{}': {}", source.shown(), failure.why()))
            })?;
            Ok::<_, OpenError>(answer.pieces.concat())
        };
        let start = read(0..len.min(part)).await?;
        let end = read(len.saturating_sub(part)..len).await?;
        let format = Format::probe(&start, &end);
        let size = match (format, start.get(QCOW2_SIZE)) {
            (Some(Format::Qcow2), Some(size)) => {
                size.iter().fold(0, |size, byte| size << 8 | u64::from(*byte))
            }
            _ => len,
        };
        let identity = source.identity();
        let told_by = match (identity.strong_etag(), &identity.modified) {
            (Some(_), _) => ToldBy::Etag,
            (None, Some(_)) => ToldBy::Time,
            (None, None) => ToldBy::Length,
        };
        let (size, content) = (size.next_multiple_of(SECTOR), identity.lasting());
        Ok(ProbedUrl { format, size, content, told_by })
    })
}
