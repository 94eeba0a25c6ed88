//! A luks node.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use ::options::Value;
use crypto::cipher::{SECTOR, SectorCipher};
use event_loop::EventLoop;

use crate::drivers::align::{Aligned, WholeBlocks};
use crate::drivers::common::{Common, check_writable};
use crate::drivers::encryption::{Encrypted, EncryptedChannel, KeySlots, Unlocked, specific};
use crate::drivers::range_lock::RangeLock;
use crate::error::OpenError;
use crate::node::{
    BlockNode, Channel, FormattedImage, Geometry, HostStorage, ImageDetails, OtherBytes,
    ResizeError, Resized,
};
use crate::options::BlockdevOptions;
use crate::request::Request;

/// An encrypted disk.
pub(super) struct LuksNode {
    name: String,
    child: Arc<dyn BlockNode>,
    slots: Arc<KeySlots>,
    shared: Arc<Shared>,
}

/// What the node's channels share.
pub(super) struct Shared {
    cipher: Arc<SectorCipher>,
    /// Where the first encrypted byte is in the child.
    payload: u64,
    common: Common,
    child: Arc<dyn BlockNode>,
    range_lock: RangeLock,
}

impl LuksNode {
    pub(super) fn new(
        name: String,
        options: &BlockdevOptions,
        unlocked: Unlocked,
        child: Arc<dyn BlockNode>,
    ) -> Result<Self, OpenError> {
        check_writable(options, &child)?;
        let common = Common::new(options, &*child);
        let Unlocked { cipher, payload, slots } = unlocked;
        let size = child.geometry().size;
        if payload > size {
            return Err(OpenError::new(format!(
                "LUKS header is not valid: the data begins at byte {payload}, and node '{}' has {size}",
                child.name()
            )));
        }
        let range_lock = RangeLock::new(SECTOR);
        let shared = Shared { cipher, payload, common, child: child.clone(), range_lock };
        Ok(LuksNode { name, child, slots, shared: Arc::new(shared) })
    }
}

impl Shared {
    /// Bytes of the disk.
    fn size(&self) -> u64 {
        let room = self.child.geometry().size.saturating_sub(self.payload);
        room - room % SECTOR as u64
    }
}

impl WholeBlocks for Shared {
    fn block(&self) -> u64 {
        SECTOR as u64
    }

    fn range_lock(&self) -> &RangeLock {
        &self.range_lock
    }

    /// Also checks that the range lies on the disk. The child checks requests of whole sectors.
    fn admit(&self, request: Request) -> Option<Request> {
        let request = self.common.admit(request)?;
        match request.offset.checked_add(request.len) {
            Some(end) if end <= self.size() => Some(request),
            _ => {
                let errno = request.op.beyond_end();
                request.complete(Err(errno));
                None
            }
        }
    }
}

impl Encrypted for Shared {
    fn cipher(&self) -> &SectorCipher {
        &self.cipher
    }

    fn payload(&self) -> u64 {
        self.payload
    }

    fn passes_discards(&self) -> bool {
        false
    }
}

impl BlockNode for LuksNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        let geometry = self.shared.common.geometry(self.child.geometry());
        Geometry {
            size: self.shared.size(),
            request_alignment: SECTOR as u32,
            discard: false,
            write_zeroes: false,
            ..geometry
        }
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.child.clone())
    }

    fn end(&self) -> Option<u64> {
        // What was never written reads as noise.
        None
    }

    fn enable_growth(&self) {}

    fn resize(self: Arc<Self>, size: u64, event_loop: &EventLoop) -> Resized {
        let event_loop = event_loop.clone();
        Box::pin(async move {
            ResizeError::check(size, self.geometry().read_only)?;
            match size.checked_add(self.shared.payload).filter(|&end| i64::try_from(end).is_ok()) {
                Some(end) => self.child.clone().resize(end, &event_loop).await,
                None => Err(ResizeError::Offset),
            }
        })
    }

    fn host_storage(self: Arc<Self>) -> Option<Arc<dyn HostStorage>> {
        Some(Arc::new(OtherBytes(self.child.clone().host_storage()?)))
    }

    fn image(self: Arc<Self>) -> Option<Arc<dyn FormattedImage>> {
        Some(self)
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let child = self.child.clone().open_channel(event_loop)?;
        let sectors = EncryptedChannel::new(event_loop, self.shared.clone(), child);
        Ok(Aligned::new(event_loop, &self.shared, sectors))
    }
}

impl FormattedImage for LuksNode {
    fn details(&self) -> ImageDetails {
        let specific =
            [("type", "luks".into()), ("data", Value::Object(specific(&self.slots.header())))];
        let specific = specific.map(|(name, value): (&str, Value)| (name.to_owned(), value));
        ImageDetails {
            cluster_size: None,
            encrypted: true,
            backing: None,
            specific: specific.into(),
        }
    }

    fn key_slots(&self) -> Option<Arc<KeySlots>> {
        Some(self.slots.clone())
    }
}
