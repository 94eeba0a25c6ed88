//! Requests that go straight to a node below, because their whole range lies in one place there.
//!
//! They need no task and no heap memory. The clusters of the range are claimed until the answer, so they stay in
//! place.

use std::cell::RefCell;
use std::rc::Rc;

use event_loop::sync::lock;
use event_loop::{IoBufs, Slab};
use nix::errno::Errno;

use super::access::Place;
use super::context::Channels;
use super::image::Image;
use super::inflated::Cluster;
use super::locks::Taken;
use crate::node::Channel;
use crate::request::{Detached, Op, Request, RequestOwner};

/// Requests of one channel in flight at the nodes below.
#[derive(Default)]
pub(super) struct Direct(RefCell<Slab<OnItsWay>>);

struct OnItsWay {
    request: Detached,
    taken: Taken,
}

/// The result of an attempt.
pub(super) enum Begun {
    /// It was sent down.
    Sent,
    /// It was answered.
    Answered,
    /// It needs a task.
    Not(Request),
}

/// Where the whole range of a request is.
enum Goes<'a> {
    /// In a node below, and the offset there.
    Below(&'a Rc<dyn Channel>, u64),
    /// It reads as zeroes.
    Zeroes,
    /// In a cluster that is inflated.
    Inflated(Cluster),
}

impl Direct {
    /// Sends a request down if its range lies in one place and no other request changes that. Its answer goes to `to`,
    /// which calls [`end`](Self::end).
    pub(super) fn begin(
        &self,
        image: &Image,
        channels: &Channels,
        mut request: Request,
        to: &Rc<dyn RequestOwner>,
    ) -> Begun {
        let writes = match request.op {
            Op::Write { .. } if request.compress => return Begun::Not(request),
            Op::Read => false,
            // No answer may depend on metadata that a kill would lose. For a durable write, the metadata
            // has to be on stable storage too.
            Op::Write { fua } if image.is_committed() && (!fua || image.is_stable()) => true,
            Op::Write { .. }
            | Op::Flush
            | Op::Discard
            | Op::WriteZeroes { .. }
            | Op::BlockStatus => {
                return Begun::Not(request);
            }
        };
        let Some((goes, taken)) = find(image, channels, &request, writes) else {
            return Begun::Not(request);
        };
        let (below, offset) = match goes {
            Goes::Below(below, offset) => (below, offset),
            Goes::Zeroes => {
                image.give_back(taken);
                request.bufs.zero(0, request.bufs.len());
                request.complete(Ok(()));
                return Begun::Answered;
            }
            Goes::Inflated(cluster) => {
                let start = (request.offset % image.cluster) as usize;
                let Some(data) = cluster.get(start..start + request.len as usize) else {
                    image.give_back(taken);
                    return Begun::Not(request);
                };
                request.bufs.copy_in(0, data);
                image.give_back(taken);
                request.complete(Ok(()));
                return Begun::Answered;
            }
        };
        let (op, len) = (request.op, request.len);
        let (request, bufs) = request.detach();
        let place = self.0.borrow_mut().insert(OnItsWay { request, taken });
        below.submit(Request::new(op, offset, len, bufs, to, place));
        Begun::Sent
    }

    /// Answers the request with this number.
    pub(super) fn end(&self, image: &Image, place: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let ended = self.0.borrow_mut().remove(place);
        if let Some(OnItsWay { request, taken }) = ended {
            image.give_back(taken);
            if request.op() != Op::Read {
                image.shared.ended_write();
            }
            request.complete(result, bufs);
        }
    }
}

/// The place of a request, with its clusters claimed. `None`: it has several places, or none, or has to wait.
fn find<'a>(
    image: &Image,
    channels: &'a Channels,
    request: &Request,
    writes: bool,
) -> Option<(Goes<'a>, Taken)> {
    let Request { offset, len, .. } = *request;
    if len == 0 {
        return None;
    }
    let mut core = lock(&image.core);
    if image.damage.is_cut_off() {
        return None;
    }
    // What is damaged is found again, and reported, by the task.
    let (place, found) = match writes {
        false => core.engine.find(offset, len),
        true => core.engine.find_to_change(offset, len),
    }
    .ok()?;
    if found < len {
        return None;
    }
    let goes = match (place, &channels.backing) {
        (Place::Data { at, own }, _) if own || !writes => Goes::Below(channels.data(), at),
        (Place::Compressed, _) if !writes && is_in_one(offset, len, image.cluster) => {
            let place = core.engine.find_compressed(offset).ok()??;
            Goes::Inflated(image.inflated.get(place)?)
        }
        (Place::Data { .. } | Place::Compressed, _) => return None,
        (Place::Zeroes | Place::Nowhere, _) if writes => return None,
        (Place::Nowhere, Some((backing, size))) if offset + len <= *size => {
            Goes::Below(backing, offset)
        }
        (Place::Nowhere, Some(_)) => return None,
        (Place::Zeroes, _) | (Place::Nowhere, None) => Goes::Zeroes,
    };
    let taken = core.ranges.try_take(&image.clusters(offset..offset + len), false)?;
    Some((goes, taken))
}

/// Whether a range is in one cluster.
fn is_in_one(offset: u64, len: u64, cluster: u64) -> bool {
    offset / cluster == (offset + len - 1) / cluster
}
