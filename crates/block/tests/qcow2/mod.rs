//! qcow2 images, with QEMU's tools as the judge: `qemu-img` makes them, fills them, checks them and
//! compares what they hold.

mod bitmaps;
mod check;
mod costs;
mod cut_off;
mod damage;
mod full;
pub(crate) mod image;
mod inflated;
mod kept;
mod killed;
mod model;
mod raw_data;
mod resize;
mod snapshots;
mod subclusters;
mod variants;
