//! `encrypt`: images whose data is encrypted. Metadata, compressed clusters and the LUKS header itself are not.
//!
//! A sector is encrypted by its place in the data's file. So an [`EncryptedChannel`] on top of that file is
//! what data is read from and written to; the rest of the driver knows nothing of it.

use std::rc::Rc;
use std::sync::Arc;

use ::options::place::{Text, write_tagged};
use ::options::shape::{Member, Union, Variant};
use ::options::table::{self, Context, Field, Row};
use ::options::{OptionError, Value};
use crypto::cipher::{SECTOR, SectorCipher};
use event_loop::EventLoop;

use super::header::{self, Header, Purpose};
use crate::drivers::align::{Aligned, WholeBlocks};
use crate::drivers::encryption::{
    AmendLuks, Encrypted, EncryptedChannel, LuksDraft, NewLuks, Read,
};
use crate::drivers::range_lock::RangeLock;
use crate::error::OpenError;
use crate::node::Channel;
use crate::request::Request;

/// `encrypt` of a node: LUKS, the only format.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encrypt {
    /// `key-secret`: the `id` of the secret with the password.
    pub key_secret: Option<String>,
}

impl Encrypt {
    /// Returns the options as they are written.
    pub(super) fn write(&self) -> Value {
        write_tagged("format", "luks", FIELDS, self.clone())
    }
}

static FIELDS: &[Field<Encrypt>] = &[Row::optional(
    "key-secret",
    "none, and the image cannot be opened",
    "the secret object with the password",
)
.at(&Text("<id>", |node: &mut Encrypt| &mut node.key_secret))];

/// Returns what [`read`] reads.
pub(super) fn union() -> Union {
    union_of(table::members(FIELDS))
}

fn union_of(members: Vec<Member>) -> Union {
    Union {
        tag: "format",
        help: "the format of the encryption",
        common: Vec::new(),
        variants: vec![Variant { name: "luks", help: "LUKS, version 1", example: "", members }],
    }
}

/// Reads `encrypt`.
pub(super) fn read(value: Value, at: &Context) -> Result<Encrypt, OptionError> {
    read_fields(FIELDS, value, at)
}

fn read_fields<T: Default>(
    fields: &[Field<T>],
    value: Value,
    at: &Context,
) -> Result<T, OptionError> {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let format = match table::take(&mut object, "format") {
        Some(value) => table::text(value, &at.full("format"), at)?,
        None => return Err(table::missing(&at.full("format"))),
    };
    match format.as_str() {
        "luks" => {}
        "aes" => {
            return Err(OptionError::new(LEGACY).hint(ADVICE));
        }
        other => return Err(table::not_accepted("format", at, other, ["luks"].into_iter())),
    }
    let mut draft = T::default();
    table::read(fields, &mut draft, &mut object, at)?;
    table::refuse_rest(&object, at, "'encrypt'", table::names(fields))?;
    Ok(draft)
}

static NEW_FIELDS: &[Field<NewLuks>] = &[
    NewLuks::KEY_SECRET,
    NewLuks::CIPHER_ALG,
    NewLuks::CIPHER_MODE,
    NewLuks::IVGEN_ALG,
    NewLuks::IVGEN_HASH_ALG,
    NewLuks::HASH_ALG,
    NewLuks::ITER_TIME,
];

/// Returns what [`read_new`] reads.
pub(super) fn new_union() -> Union {
    union_of(table::members(NEW_FIELDS))
}

/// Reads `encrypt` of a new image.
pub(super) fn read_new(value: Value, at: &Context) -> Result<NewLuks, OptionError> {
    read_fields(NEW_FIELDS, value, at)
}

/// Returns what [`read_amend`] reads.
pub(super) fn amend_union() -> Union {
    union_of(table::members(AmendLuks::FIELDS))
}

/// Reads `encrypt` of a change.
pub(super) fn read_amend(value: Value, at: &Context) -> Result<AmendLuks, OptionError> {
    read_fields(AmendLuks::FIELDS, value, at)
}

/// The error of an image that is encrypted as before LUKS,
const LEGACY: &str = "Images encrypted with format 'aes' are not supported";
/// and what to do with the image.
const ADVICE: &str =
    "That format is insecure. qemu-img convert makes an image with encrypt.format=luks of it.";

/// The error of an image that is encrypted as before LUKS.
pub(super) fn legacy() -> OpenError {
    OpenError::new(LEGACY).with_hint(ADVICE)
}

/// Returns the offset of the LUKS header in an image.
pub(super) fn locate(read: Read<'_>) -> Result<u64, OpenError> {
    let start = read(0, header::USUAL as u64)?;
    let start = match header::to_read(&start) {
        ..=header::USUAL => start,
        more => read(0, more as u64)?,
    };
    // As for reading: what keeps the image from being written is told when it is opened.
    let header = Header::parse(&start, Purpose::Read)?;
    header.luks.map(|place| place.start).ok_or_else(|| {
        OpenError::new("No encryption in image header, but options specified format 'luks'")
    })
}

/// The data's file of an encrypted image, as the image's channels share it.
pub(super) struct EncryptedData {
    cipher: Arc<SectorCipher>,
    range_lock: RangeLock,
}

impl EncryptedData {
    pub(super) fn new(cipher: Arc<SectorCipher>) -> EncryptedData {
        EncryptedData { cipher, range_lock: RangeLock::new(SECTOR) }
    }

    /// Returns a channel of plain data on top of one of encrypted data.
    pub(super) fn open_channel(
        self: &Arc<Self>,
        event_loop: &EventLoop,
        data: &Rc<dyn Channel>,
    ) -> Rc<dyn Channel> {
        let sectors = EncryptedChannel::new(event_loop, self.clone(), data.clone());
        Aligned::new(event_loop, self, sectors)
    }
}

impl WholeBlocks for EncryptedData {
    fn block(&self) -> u64 {
        SECTOR as u64
    }

    fn range_lock(&self) -> &RangeLock {
        &self.range_lock
    }

    fn admit(&self, request: Request) -> Option<Request> {
        // The image has checked it.
        Some(request)
    }
}

impl Encrypted for EncryptedData {
    fn cipher(&self) -> &SectorCipher {
        &self.cipher
    }

    fn payload(&self) -> u64 {
        0
    }

    fn passes_discards(&self) -> bool {
        true
    }
}
