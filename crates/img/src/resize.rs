//! Other sizes of disks.

use crate::error::Error;
use crate::images::{Image, Images};

impl Images {
    /// Gives the disk of an image another size, in bytes. What lies beyond a smaller size is lost.
    ///
    /// # Errors
    ///
    /// The size is fixed, or there is no space. The image is as it was.
    pub fn resize(&mut self, image: &Image, size: u64) -> Result<(), Error> {
        let resizing = self.nodes.resize(&image.node_name, size, &self.event_loop)?;
        self.block_on(resizing)?.map_err(|error| Error::new(error.to_string()))
    }
}
