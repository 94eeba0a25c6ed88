//! What QMP tells of an image: QEMU's `ImageInfoSpecificQCow2`, and the backing file's name.

use std::ffi::OsStr;
use std::sync::{Arc, Mutex};

use ::options::{Object, Value};
use event_loop::sync::lock;

use super::bitmaps::Told;
use super::header::Header;
use crate::drivers::encryption::{KeySlots, specific};
use crate::node::{BackingName, ImageDetails};

/// The byte of a header of version 3 with the lowest compatible features, and the bit of lazy reference counts.
const COMPATIBLE_AT: usize = 87;
const LAZY_REFCOUNTS: u8 = 1;
/// The same of incompatible features, and the bit of damage.
const INCOMPATIBLE_AT: usize = 79;
const CORRUPT: u8 = 2;

/// What was in the header when the image was opened, but for the backing file's name, which may change.
pub(super) struct Details {
    cluster: u64,
    data: Object,
    encrypted: bool,
    backing: Mutex<Option<BackingName>>,
    /// Of an encrypted image.
    slots: Option<Arc<KeySlots>>,
}

impl Details {
    /// Of an image that begins with these bytes. `slots`: of an encrypted image.
    pub(super) fn new(start: &[u8], header: &Header, slots: Option<Arc<KeySlots>>) -> Details {
        let has = |at, bit| start.get(at).is_some_and(|byte: &u8| byte & bit != 0);
        let mut data: Vec<(&str, Value)> = Vec::new();
        match header.version {
            2 => data.push(("compat", "0.10".into())),
            _ => data.extend([
                ("compat", "1.1".into()),
                ("lazy-refcounts", has(COMPATIBLE_AT, LAZY_REFCOUNTS).into()),
                ("corrupt", has(INCOMPATIBLE_AT, CORRUPT).into()),
                ("extended-l2", header.extended_l2.into()),
            ]),
        }
        if let Some(data_file) = &header.data_file {
            let name = data_file.filename.as_deref().map(OsStr::to_string_lossy);
            data.extend(name.map(|name| ("data-file", name.into_owned().into())));
            data.push(("data-file-raw", header.data_file_raw.into()));
        }
        data.push(("refcount-bits", header.refcount_bits.into()));
        data.push(("compression-type", header.compression.name().into()));
        let backing = header.backing.as_ref().map(|backing| BackingName {
            filename: backing.filename.to_string_lossy().into_owned(),
            format: backing.format.clone(),
        });
        Details {
            cluster: header.cluster,
            encrypted: header.luks.is_some(),
            data: data.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            backing: Mutex::new(backing),
            slots,
        }
    }

    /// The header names another backing file now.
    pub(super) fn set_backing(&self, backing: Option<BackingName>) {
        *lock(&self.backing) = backing;
    }

    /// The key slots of an encrypted image.
    pub(super) fn key_slots(&self) -> Option<Arc<KeySlots>> {
        self.slots.clone()
    }

    /// With the bitmaps that the file has, and the number of those that are left out.
    pub(super) fn get(&self, (bitmaps, left_out): (&[Told], usize)) -> ImageDetails {
        let mut data = self.data.clone();
        if let Some(slots) = &self.slots {
            let format = ("format".to_owned(), Value::from("luks"));
            let encrypt = [format].into_iter().chain(specific(&slots.header()));
            data.push(("encrypt".to_owned(), Value::Object(encrypt.collect())));
        }
        if !bitmaps.is_empty() {
            let tell = |Told { name, granularity, flags }: &Told| {
                let flags = flags.iter().map(|flag| (*flag).into()).collect();
                let members = [
                    ("flags", Value::List(flags)),
                    ("name", name.as_str().into()),
                    ("granularity", (*granularity).into()),
                ];
                let members = members.map(|(name, value)| (name.to_owned(), value));
                Value::Object(members.into_iter().collect())
            };
            let bitmaps = Value::List(bitmaps.iter().map(tell).collect());
            data.push(("bitmaps".to_owned(), bitmaps));
        }
        if left_out > 0 {
            data.push(("x-bitmaps-left-out".to_owned(), (left_out as u64).into()));
        }
        let data = Value::Object(data);
        ImageDetails {
            cluster_size: Some(self.cluster),
            encrypted: self.encrypted,
            backing: lock(&self.backing).clone(),
            specific: vec![("type".to_owned(), "qcow2".into()), ("data".to_owned(), data)],
        }
    }
}
