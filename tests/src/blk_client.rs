//! A vhost-user-blk front end without a guest, over the `virtio-driver` crate.
//!
//! The client builds each request itself, so tests can send malformed ones.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::slice;
use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use virtio_driver::virtqueue::{Virtqueue, VirtqueueLayout};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioFeatureFlags,
    VirtioTransport, iovec,
};

use crate::PATIENCE;

/// Values of a request's type (virtio 1.2, section 5.2.6).
pub mod request {
    /// `VIRTIO_BLK_T_IN`: read.
    pub const IN: u32 = 0;
    /// `VIRTIO_BLK_T_OUT`: write.
    pub const OUT: u32 = 1;
    /// `VIRTIO_BLK_T_FLUSH`.
    pub const FLUSH: u32 = 4;
    /// `VIRTIO_BLK_T_GET_ID`.
    pub const GET_ID: u32 = 8;
    /// `VIRTIO_BLK_T_DISCARD`.
    pub const DISCARD: u32 = 11;
    /// `VIRTIO_BLK_T_WRITE_ZEROES`.
    pub const WRITE_ZEROES: u32 = 13;
}

/// Address of the client's memory in the address space that both sides share. Nothing is mapped there: the
/// client reads and writes the memory as a file.
pub const MEMORY_AT: u64 = 0x10_0000_0000;
/// Its size, bytes.
const MEMORY_SIZE: u64 = 16 << 20;

/// The header and the status byte of a request, as the device sees them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Frame {
    kind: u32,
    reserved: u32,
    sector: u64,
    status: u8,
}

/// A part of a request between header and status, in the client's memory.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Offset in the memory, bytes.
    pub at: u64,
    /// Length, bytes.
    pub len: usize,
    /// Whether the device writes this part.
    pub device_writes: bool,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its type: one of [`request`], or an invalid one.
    pub kind: u32,
    /// Its first sector of 512 bytes.
    pub sector: u64,
    /// The data.
    pub segments: Vec<Segment>,
}

/// A request that the device has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The id that [`BlkClient::submit`] returned.
    pub id: u16,
    /// 0: done, 1: I/O error, 2: unsupported; 255 if the device has not set it.
    pub status: u8,
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// As in [`Completion`].
    pub status: u8,
    /// The data that the device has read.
    pub data: Vec<u8>,
}

/// A front end, connected to an export.
pub struct BlkClient {
    queues: Vec<Queue>,
    memory: File,
    memory_at: u64,
    // Dropped after the queues, which use its memory.
    transport: VhostUser<VirtioBlkConfig, Frame>,
}

struct Queue {
    ring: Virtqueue<'static, Frame>,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
}

impl BlkClient {
    /// Connects to `socket` with `queues` queues of `depth` descriptors.
    ///
    /// # Errors
    ///
    /// The device refuses a feature or message.
    pub fn connect(socket: &Path, queues: usize, depth: u16) -> io::Result<Self> {
        Self::connect_at(socket, queues, depth, MEMORY_AT)
    }

    /// Connects with the client's memory at another address.
    ///
    /// # Errors
    ///
    /// The device refuses a feature or message.
    pub fn connect_at(
        socket: &Path,
        queues: usize,
        depth: u16,
        memory_at: u64,
    ) -> io::Result<Self> {
        let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        let features = features.bits() | VirtioBlkFeatureFlags::all().bits();
        let socket = socket.to_str().ok_or(io::ErrorKind::InvalidInput)?;
        let mut transport = VhostUser::<VirtioBlkConfig, Frame>::new(socket, features)?;

        let memory = File::from(memfd_create("memory", MFdFlags::MFD_CLOEXEC)?);
        memory.set_len(MEMORY_SIZE)?;
        let (at, size) = (memory_at as usize, MEMORY_SIZE as usize);
        transport.map_mem_region(at, size, memory.as_raw_fd(), 0)?;

        let features = VirtioFeatureFlags::from_bits_truncate(transport.get_features());
        let layout = VirtqueueLayout::new::<Frame>(queues, depth.into(), features)?;
        let area = transport.alloc_queue_mem(&layout)?;
        let (start, area_len) = (area.as_mut_ptr(), area.len());
        let mut rings = Vec::with_capacity(queues);
        for index in 0..queues {
            let offset = index * layout.end_offset;
            assert!(offset + layout.end_offset <= area_len, "the area holds all queues");
            #[expect(
                unsafe_code,
                reason = "virtio-driver ties a queue to a borrow of its transport"
            )]
            // SAFETY: the slice is inside of the area by the assertion, no two slices overlap, and nothing
            // else refers to them. The area is a mapping that `transport` owns until it is dropped. By the order
            // of the fields of `Self`, that is after the rings. Moving `transport` does not move the mapping.
            let slice = unsafe { slice::from_raw_parts_mut(start.add(offset), layout.end_offset) };
            let mut ring = Virtqueue::new(transport.iova_translator(), slice, depth, features)?;
            ring.set_used_notif_enabled(true);
            rings.push(ring);
        }
        transport.setup_queues(&rings)?;
        let queues = rings.into_iter().enumerate().map(|(index, ring)| Queue {
            ring,
            kick: transport.get_submission_notifier(index),
            call: transport.get_completion_fd(index),
        });
        Ok(Self { queues: queues.collect(), memory, memory_at, transport })
    }

    /// The device's configuration space.
    ///
    /// # Errors
    ///
    /// The device does not answer.
    pub fn config(&self) -> io::Result<VirtioBlkConfig> {
        self.transport.get_config()
    }

    /// Returns the negotiated features.
    pub fn features(&self) -> VirtioBlkFeatureFlags {
        VirtioBlkFeatureFlags::from_bits_truncate(self.transport.get_features())
    }

    /// Returns whether a notification is pending that [`BlkClient::wait`] has not taken.
    ///
    /// # Errors
    ///
    /// The eventfd cannot be polled.
    pub fn is_notified(&self, queue: usize) -> io::Result<bool> {
        let call = self.queues[queue].call.as_fd();
        Ok(poll(&mut [PollFd::new(call, PollFlags::POLLIN)], PollTimeout::ZERO)? == 1)
    }

    /// Copies `data` to the client's memory.
    pub fn put(&self, at: u64, data: &[u8]) {
        assert!(at + data.len() as u64 <= MEMORY_SIZE, "within the memory");
        self.memory.write_all_at(data, at).expect("the memory takes data");
    }

    /// Returns a part of the client's memory.
    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory.read_exact_at(&mut data, at).expect("within the memory");
        data
    }

    /// Makes a request available, and notifies the device if it requests that. Returns the request's id.
    pub fn submit(&mut self, queue: usize, request: &Request) -> u16 {
        let Queue { ring, kick, .. } = &mut self.queues[queue];
        let id = ring.add_request(|frame, add| {
            let Request { kind, sector, .. } = *request;
            *frame = Frame { kind, reserved: 0, sector, status: u8::MAX };
            add(part(&raw mut frame.kind, 16), false)?;
            for segment in &request.segments {
                let address = (self.memory_at + segment.at) as *mut u8;
                add(part(address, segment.len), segment.device_writes)?;
            }
            add(part(&raw mut frame.status, 1), true)
        });
        let id = id.expect("room in the queue");
        if ring.avail_notif_needed() {
            kick.notify().expect("the eventfd takes a notification");
        }
        id
    }

    /// Waits until the device has completed a request of the queue, or several.
    ///
    /// # Errors
    ///
    /// `TimedOut` if no notification comes.
    pub fn wait(&mut self, queue: usize) -> io::Result<Vec<Completion>> {
        let Queue { ring, call, .. } = &mut self.queues[queue];
        loop {
            let done: Vec<_> = ring
                .completions()
                .map(|done| Completion { id: done.id, status: done.req.status })
                .collect();
            if !done.is_empty() {
                return Ok(done);
            }
            let timeout = PollTimeout::try_from(PATIENCE).map_err(io::Error::other)?;
            if poll(&mut [PollFd::new(call.as_fd(), PollFlags::POLLIN)], timeout)? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            call.read()?;
        }
    }

    /// Sends a request on queue 0, with `output` for the device to read and `input` bytes for it to write. Waits
    /// for the reply.
    ///
    /// # Panics
    ///
    /// If no reply comes.
    pub fn call(&mut self, kind: u32, sector: u64, output: &[u8], input: usize) -> Reply {
        let output_segment = Segment { at: 0, len: output.len(), device_writes: false };
        let input_segment = Segment { at: output.len() as u64, len: input, device_writes: true };
        let segments = [output_segment, input_segment].into_iter().filter(|part| part.len > 0);
        self.put(0, output);
        self.put(input_segment.at, &vec![0xee; input]);
        let id = self.submit(0, &Request { kind, sector, segments: segments.collect() });
        let done = self.wait(0).expect("a reply");
        assert_eq!(done.len(), 1, "one request, one reply");
        assert_eq!(done[0].id, id, "the reply to another request");
        Reply { status: done[0].status, data: self.get(input_segment.at, input) }
    }

    /// Reads `len` bytes from `sector` on.
    ///
    /// # Panics
    ///
    /// If the status is not 0.
    pub fn read(&mut self, sector: u64, len: usize) -> Vec<u8> {
        let reply = self.call(request::IN, sector, &[], len);
        assert_eq!(reply.status, 0, "status of a read of {len} bytes at sector {sector}");
        reply.data
    }

    /// Writes `data` from `sector` on.
    ///
    /// # Panics
    ///
    /// If the status is not 0.
    pub fn write(&mut self, sector: u64, data: &[u8]) {
        let reply = self.call(request::OUT, sector, data, 0);
        assert_eq!(reply.status, 0, "status of a write of {} bytes at sector {sector}", data.len());
    }
}

fn part<T>(start: *mut T, len: usize) -> iovec {
    iovec { iov_base: start.cast::<c_void>(), iov_len: len }
}
