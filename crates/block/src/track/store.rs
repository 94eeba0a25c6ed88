//! Dirty bitmaps in an image.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use event_loop::EventLoop;
use nix::errno::Errno;

use super::{DirtyBitmap, Tracking};

/// Completes with the result of [`forget`](BitmapStore::forget).
pub type Forgotten = Pin<Box<dyn Future<Output = Result<(), Errno>>>>;

/// Completes with the result of [`check_new`](BitmapStore::check_new).
pub type Checked = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// The dirty bitmaps in an image.
///
/// An image that is open for writing marks its bitmaps as in use, and stores them when it is closed.
pub trait BitmapStore: Any + Send + Sync {
    /// Returns the bitmaps that were in the image when it was opened.
    fn bitmaps(&self) -> Vec<Arc<DirtyBitmap>>;

    /// Has the image store the bitmaps of `tracking` from now on.
    ///
    /// They take the place of those that the image was opened with.
    fn keep(&self, tracking: Arc<Tracking>);

    /// Takes over the files of bitmaps that survive a kill, of the node that this image was opened with before.
    fn take_kept(&self, before: &dyn BitmapStore);

    /// Checks whether the image can have one more bitmap.
    ///
    /// A bit would be for `granularity` bytes.
    ///
    /// # Errors
    ///
    /// In QEMU's words. Or the header of the image has no room for the place of bitmaps, or cannot be read.
    fn check_new(self: Arc<Self>, name: &str, granularity: u64, event_loop: &EventLoop) -> Checked;

    /// Returns a new bitmap, for [`add_bitmap`](Tracking::add_bitmap).
    ///
    /// If possible, its bits survive a kill of the process. They are those that another process hands over, if it has
    /// kept such a bitmap. `size`: bytes of the disk.
    fn new_bitmap(&self, name: &str, size: u64, granularity: u64, recording: bool) -> DirtyBitmap;

    /// Has bitmaps that were added survive a kill of the process from now on.
    ///
    /// Completes at once if they cannot.
    ///
    /// # Errors
    ///
    /// Those of the image's file. A kill may leave the bitmaps inconsistent.
    fn secure(self: Arc<Self>, event_loop: &EventLoop) -> Forgotten;

    /// Removes a bitmap from the image.
    ///
    /// Completes when the image does not name the bitmap.
    ///
    /// # Errors
    ///
    /// Those of the image's file. The image names the bitmap.
    fn forget(self: Arc<Self>, name: &str, event_loop: &EventLoop) -> Forgotten;
}
