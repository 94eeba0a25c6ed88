//! One loop's channel to encrypted sectors. Requests are whole sectors.
//!
//! A read goes into the guest's memory and is decrypted in place. A write is encrypted into a separate
//! buffer, because the guest keeps its plaintext. The data of large requests is copied, and threads of the pool do the
//! work, so that other requests of the loop need not wait for it.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use crypto::cipher::{SECTOR, SectorCipher};
use event_loop::{EventLoop, IoBufs, Lane, Slab};
use nix::errno::Errno;

use super::bounce::{Bounces, MOST};
use crate::drivers::align::WholeBlocks;
use crate::node::Channel;
use crate::request::{CompletionGuard, Op, Request, RequestOwner};
use crate::status::{self, Extent, ExtentState};
use crate::submit::submit;

/// Requests under way that there is room for from the start.
const FIRST: usize = 256;
/// Bytes that are encrypted at once: they stay in the fastest cache.
const CHUNK: usize = 1 << 12;
/// Requests of so many bytes are large.
const LARGE: usize = 1 << 17;
/// Bytes of a large request for one thread.
const PART: usize = 1 << 17;

/// What lies behind a channel.
pub(crate) trait Encrypted: WholeBlocks + Send + Sync {
    /// The cipher. The sectors of the child count from [`payload`](Self::payload) on.
    fn cipher(&self) -> &SectorCipher;

    /// The byte of the child where the first encrypted sector begins.
    fn payload(&self) -> u64;

    /// Whether the child gets discards. A sector that the child has discarded reads as noise.
    fn passes_discards(&self) -> bool;
}

pub(crate) struct EncryptedChannel<S> {
    me: Weak<EncryptedChannel<S>>,
    event_loop: EventLoop,
    lane: Lane,
    shared: Arc<S>,
    child: Rc<dyn Channel>,
    under_way: RefCell<Slab<UnderWay>>,
    bounces: RefCell<Bounces>,
    /// Requests that tasks work on.
    tasks: Cell<usize>,
}

enum UnderWay {
    /// The memory is to be decrypted, from that sector on.
    Read { owed: CompletionGuard, sector: u64 },
    /// The request, and the buffer that has its data encrypted.
    Write(Request, IoBufs),
}

impl<S: Encrypted> EncryptedChannel<S> {
    pub(crate) fn new(event_loop: &EventLoop, shared: Arc<S>, child: Rc<dyn Channel>) -> Rc<Self> {
        Rc::new_cyclic(|me| EncryptedChannel {
            me: me.clone(),
            event_loop: event_loop.clone(),
            lane: Lane::default(),
            shared,
            child,
            under_way: RefCell::new(Slab::with_capacity(FIRST)),
            bounces: RefCell::default(),
            tasks: Cell::new(0),
        })
    }

    fn read(&self, me: Rc<dyn RequestOwner>, mut request: Request) {
        let sector = request.offset / SECTOR as u64;
        request.offset += self.shared.payload();
        let mut under_way = self.under_way.borrow_mut();
        let owed = request.intercept(&me, under_way.next_tag());
        under_way.insert(UnderWay::Read { owed, sector });
        drop(under_way);
        self.child.submit(request);
    }

    fn write(&self, me: &Rc<dyn RequestOwner>, request: Request) {
        let Some(encrypted) = self.encrypted(&request, 0, request.len as usize) else {
            return request.complete(Err(Errno::ENOMEM));
        };
        if request.bufs.is_lost() {
            self.bounces.borrow_mut().give(encrypted);
            return request.complete(Err(Errno::EFAULT));
        }
        let (op, len) = (request.op, request.len);
        let offset = request.offset + self.shared.payload();
        let data = part(&encrypted, len);
        let tag = self.under_way.borrow_mut().insert(UnderWay::Write(request, encrypted));
        self.child.submit(Request::new(op, offset, len, data, me, tag));
    }

    /// Encrypts a part of what a request writes; zeroes, if the request has no memory.
    fn encrypted(&self, request: &Request, from: usize, len: usize) -> Option<IoBufs> {
        let mut encrypted = self.bounces.borrow_mut().take(len)?;
        let mut chunk = [0; CHUNK];
        let mut done = 0;
        while done < len {
            let bytes = CHUNK.min(len - done);
            let chunk = &mut chunk[..bytes];
            if request.bufs.is_empty() {
                chunk.fill(0);
            } else {
                request.bufs.copy_out(from + done, chunk);
            }
            let sector = (request.offset + (from + done) as u64) / SECTOR as u64;
            self.shared.cipher().encrypt(sector, chunk);
            encrypted.copy_in(done, chunk);
            done += bytes;
        }
        Some(encrypted)
    }

    fn decrypt(&self, sector: u64, bufs: &mut IoBufs) {
        let mut chunk = [0; CHUNK];
        for at in (0..bufs.len()).step_by(CHUNK) {
            let bytes = bufs.copy_out(at, &mut chunk);
            let chunk = &mut chunk[..bytes];
            self.shared.cipher().decrypt(sector + (at / SECTOR) as u64, chunk);
            bufs.copy_in(at, chunk);
        }
    }

    /// The same as [`decrypt`](Self::decrypt), on threads of the pool.
    async fn decrypt_apart(&self, sector: u64, bufs: &mut IoBufs) -> Result<(), Errno> {
        let mut parts = Vec::new();
        for at in (0..bufs.len()).step_by(PART) {
            let mut data = vec![0; PART.min(bufs.len() - at)];
            bufs.copy_out(at, &mut data);
            let (shared, sector) = (self.shared.clone(), sector + (at / SECTOR) as u64);
            let decrypted = self.event_loop.compute(&self.lane, move || {
                shared.cipher().decrypt(sector, &mut data);
                data
            });
            parts.push((at, decrypted));
        }
        for (at, decrypted) in parts {
            bufs.copy_in(at, &decrypted.await.map_err(|_| Errno::ECANCELED)?);
        }
        Ok(())
    }

    /// The same as [`encrypted`](Self::encrypted), on threads of the pool.
    async fn encrypted_apart(
        &self,
        request: &Request,
        from: usize,
        len: usize,
    ) -> Result<IoBufs, Errno> {
        let mut parts = Vec::new();
        for at in (0..len).step_by(PART) {
            let mut data = vec![0; PART.min(len - at)];
            if !request.bufs.is_empty() {
                request.bufs.copy_out(from + at, &mut data);
            }
            let sector = (request.offset + (from + at) as u64) / SECTOR as u64;
            let shared = self.shared.clone();
            let encrypted = self.event_loop.compute(&self.lane, move || {
                shared.cipher().encrypt(sector, &mut data);
                data
            });
            parts.push((at, encrypted));
        }
        let mut encrypted = self.bounces.borrow_mut().take(len).ok_or(Errno::ENOMEM)?;
        for (at, part) in parts {
            encrypted.copy_in(at, &part.await.map_err(|_| Errno::ECANCELED)?);
        }
        Ok(encrypted)
    }

    /// Decrypts what a large request has read, and answers the request.
    async fn end_read(self: Rc<Self>, mut owed: Owed, sector: u64) {
        let result = match &mut owed.0 {
            Some(request) => self.decrypt_apart(sector, &mut request.bufs).await,
            None => Ok(()),
        };
        self.tasks.set(self.tasks.get() - 1);
        owed.answer(result);
    }

    /// Writes what is large, or zeroes.
    async fn write_parts(self: Rc<Self>, owed: Owed, fua: bool) {
        let result = match &owed.0 {
            Some(request) => self.write_each(request, fua).await,
            None => Ok(()),
        };
        self.tasks.set(self.tasks.get() - 1);
        owed.answer(result);
    }

    async fn write_each(&self, request: &Request, fua: bool) -> Result<(), Errno> {
        let mut done = 0;
        while done < request.len {
            let len = (request.len - done).min(MOST as u64);
            let encrypted = match len as usize {
                LARGE.. => self.encrypted_apart(request, done as usize, len as usize).await?,
                _ => {
                    let encrypted = self.encrypted(request, done as usize, len as usize);
                    encrypted.ok_or(Errno::ENOMEM)?
                }
            };
            if request.bufs.is_lost() {
                return Err(Errno::EFAULT);
            }
            let offset = self.shared.payload() + request.offset + done;
            let data = part(&encrypted, len);
            let (result, data) = submit(&self.child, Op::Write { fua }, offset, len, data).await;
            drop(data);
            self.bounces.borrow_mut().give(encrypted);
            result?;
            done += len;
        }
        Ok(())
    }
}

/// A request that a task works on. A task that ends with its loop answers it too.
struct Owed(Option<Request>);

impl Owed {
    fn answer(mut self, result: Result<(), Errno>) {
        if let Some(request) = self.0.take() {
            request.complete(result);
        }
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if let Some(request) = self.0.take() {
            request.complete(Err(Errno::ECANCELED));
        }
    }
}

/// Returns the first `len` bytes of a buffer.
fn part(buffer: &IoBufs, len: u64) -> IoBufs {
    let mut part = IoBufs::new();
    part.set_part(buffer, 0, len as usize, 1);
    part
}

impl<S: Encrypted> Channel for EncryptedChannel<S> {
    fn submit(&self, request: Request) {
        let Some(mut request) = self.shared.admit(request) else { return };
        let Some(me) = self.me.upgrade() else { return };
        match request.op {
            Op::Read => self.read(me, request),
            Op::Write { .. } if request.len < LARGE as u64 => {
                let to: Rc<dyn RequestOwner> = me;
                self.write(&to, request);
            }
            Op::WriteZeroes { no_fallback: true, .. } => request.complete(Err(Errno::EOPNOTSUPP)),
            Op::Write { fua } | Op::WriteZeroes { fua, .. } => {
                self.tasks.set(self.tasks.get() + 1);
                self.event_loop.spawn(me.write_parts(Owed(Some(request)), fua));
            }
            Op::Flush => self.child.submit(request),
            Op::Discard if self.shared.passes_discards() => {
                request.offset += self.shared.payload();
                self.child.submit(request);
            }
            Op::Discard => request.complete(Ok(())),
            Op::BlockStatus => {
                status::write_one(&mut request.bufs, Extent::own(request.len, ExtentState::Data));
                request.complete(Ok(()));
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.tasks.get() + self.under_way.borrow().len() + self.child.in_flight()
    }

    fn drain_begin(&self) {
        self.child.drain_begin();
    }

    fn drain_end(&self) {
        self.child.drain_end();
    }
}

impl<S: Encrypted> RequestOwner for EncryptedChannel<S> {
    fn complete(&self, tag: u32, result: Result<(), Errno>, mut bufs: IoBufs) {
        let ended = self.under_way.borrow_mut().remove(tag);
        match ended {
            Some(UnderWay::Read { owed, sector }) if result.is_ok() && bufs.len() >= LARGE => {
                let Some(me) = self.me.upgrade() else { return };
                self.tasks.set(self.tasks.get() + 1);
                let (offset, len) = (sector * SECTOR as u64, bufs.len() as u64);
                let request = Request::answered_to(owed, Op::Read, offset, len, bufs);
                self.event_loop.spawn(me.end_read(Owed(Some(request)), sector));
            }
            Some(UnderWay::Read { mut owed, sector }) => {
                if result.is_ok() {
                    self.decrypt(sector, &mut bufs);
                }
                owed.send(result, bufs);
            }
            Some(UnderWay::Write(request, encrypted)) => {
                // The child's part first: then the buffer is free again.
                drop(bufs);
                self.bounces.borrow_mut().give(encrypted);
                request.complete(result);
            }
            None => {}
        }
    }
}
