//! What an image's header tells of the image, read without opening the image.

use std::sync::Arc;

use super::details::Details;
use super::header::{Header, Purpose};
use super::open::{Below, read_start, run_apart};
use super::{bitmaps, snapshots};
use crate::drivers::encryption::read_slots;
use crate::error::OpenError;
use crate::node::{BlockNode, ImageHeader, listed};

/// Reads the header of the image in a node, its table of snapshots and its list of bitmaps.
///
/// Neither the guest's data nor tables of clusters are read: the memory is that of the header's cluster and of the lists.
pub(super) fn read_header(file: &Arc<dyn BlockNode>) -> Result<ImageHeader, OpenError> {
    let start = read_start(file)?;
    let header = Header::parse(&start, Purpose::Check)?;
    let slots = header.luks.as_ref().map(|place| read_slots(file.clone(), place.start));
    let slots = slots.transpose()?;
    let below = Below { file: file.clone(), data_file: None, backing: None, encrypted: None };
    let (of_lists, end) = (header.clone(), below.file_end());
    let lists = run_apart(&below, move |channels| async move {
        let header = of_lists;
        // A damaged list leaves the rest of the description as it is.
        let snapshots = match snapshots::read_all(&channels, &header, end).await {
            Ok((snapshots, _)) => snapshots,
            Err(error) => {
                log::warn!("{error}");
                Vec::new()
            }
        };
        let bitmaps = match header.bitmaps {
            Some(extension) => bitmaps::describe(&channels, &header, extension, end).await,
            None => Ok((Vec::new(), 0)),
        };
        let bitmaps = bitmaps.unwrap_or_else(|error| {
            log::warn!("{error}");
            (Vec::new(), 0)
        });
        Ok((snapshots, bitmaps))
    });
    let (snapshots, (bitmaps, left_out)) =
        lists.map_err(|error| OpenError::io("Could not read the image's metadata", &error))?;
    let told = listed(snapshots.iter().map(|snapshot| &*snapshot.told.name));
    Ok(ImageHeader {
        size: header.size,
        is_dirty: header.is_dirty,
        details: Details::new(&start, &header, slots).get((&bitmaps, left_out)),
        snapshots: snapshots.into_iter().take(told).map(|snapshot| snapshot.told).collect(),
    })
}
