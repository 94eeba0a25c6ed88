//! What people do to disk images, without QEMU: describe, make, copy, compare and change them.
//!
//! [`Images`] is a set of images that are open together, on the block layer of ringmill: raw, qcow2 and LUKS, in files, on
//! devices, and behind NBD, Ceph and HTTP. An image is named as `qemu-img` has it named: see [`Source`].
//!
//! ```
//! use img::{Access, Images, NewImage, Source};
//!
//! let folder = std::env::temp_dir().join(format!("img-example-{}", std::process::id()));
//! std::fs::create_dir_all(&folder)?;
//! let name = folder.join("disk.qcow2").display().to_string();
//!
//! let mut images = Images::new()?;
//! let size = Some(1 << 30);
//! let new = NewImage { name: name.clone(), format: "qcow2".into(), size, ..NewImage::default() };
//! images.create(&new)?;
//!
//! // The header alone is read: neither a backing file nor a password is needed.
//! let info = images.info(&Source::new(name), &Access::READ)?;
//! assert_eq!((info.format.as_str(), info.virtual_size), ("qcow2", 1 << 30));
//! std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bitmaps;
mod chain;
mod compare;
mod copy;
mod create;
mod disk;
mod error;
mod formats;
mod images;
mod info;
pub mod json;
mod map;
mod measure;
mod resize;
mod snapshots;
mod source;
mod target;

pub use bitmaps::BitmapChange;
pub use chain::NewBacking;
pub use compare::{Compared, Unreadable};
pub use copy::CopyOptions;
pub use create::{NewImage, Plan};
pub use disk::Disk;
pub use error::Error;
pub use formats::list_options;
pub use images::{Access, Image, Images};
pub use info::ImageInfo;
pub use map::Mapped;
pub use measure::Measured;
pub use source::Source;
pub use target::Target;
