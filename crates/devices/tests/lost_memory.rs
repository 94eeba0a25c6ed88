//! What a front end has taken away is not written to the image: neither the memory that is there now, nor
//! what was copied out of it.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::NodeRegistry;
use block::options::{BlockdevOptions, Cache, DetectZeroes, Discard, Driver, FileOptions, Locking};
use block::request::{Op, Request, RequestOwner};
use event_loop::{EventLoop, IoBufs, LoopConfig};
use guest_memory::test_util::memfd_region;
use guest_memory::{GuestMemory, MemoryView};
use nix::errno::Errno;
use nix::unistd::ftruncate;

const SIZE: u64 = 1 << 20;

#[derive(Default)]
struct Answers(RefCell<Vec<Result<(), Errno>>>);

impl RequestOwner for Answers {
    fn complete(&self, _: u32, result: Result<(), Errno>, _: IoBufs) {
        self.0.borrow_mut().push(result);
    }
}

fn guest() -> (OwnedFd, Rc<MemoryView>) {
    let region = memfd_region(0, SIZE).unwrap();
    let file = region.fd.try_clone().unwrap();
    let memory = GuestMemory::from_regions([Arc::new(region.map().unwrap())]).unwrap();
    let view = MemoryView::new(Arc::new(memory));
    view.write_bytes(0, &[1; 64 << 10]).unwrap();
    (file, view)
}

/// Writes 32 KiB of the guest's memory from `addr` on to sector 8.
fn write(
    view: &Rc<MemoryView>,
    addr: u64,
    direct: bool,
    detect_zeroes: DetectZeroes,
) -> Result<(), Errno> {
    let path = std::env::temp_dir().join(format!("ringmill-lost-{}", std::process::id()));
    std::fs::write(&path, vec![0x55; SIZE as usize]).unwrap();
    let file = FileOptions { filename: path.clone(), aio: None, locking: Locking::Off };
    let options = BlockdevOptions {
        discard: Discard::Unmap,
        detect_zeroes,
        cache: Cache { direct, no_flush: false },
        ..BlockdevOptions::new(Some("disk"), Driver::file(file))
    };
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let node = NodeRegistry::new().open(&options).unwrap();
    let channel = node.open_channel(&event_loop).unwrap();
    let answers = Rc::<Answers>::default();
    let mut bufs = IoBufs::new();
    view.push_iovecs(addr, 32 << 10, &mut bufs).unwrap();
    let to = answers.clone() as Rc<dyn RequestOwner>;
    let op = Op::Write { fua: false };
    channel.submit(Request::new(op, 4096, 32 << 10, bufs, &to, 0));
    while answers.0.borrow().is_empty() {
        event_loop.run_once(true).unwrap();
    }
    let result = answers.0.borrow()[0];
    let image = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let written = &image[4096..4096 + (32 << 10)];
    let expected = if result.is_ok() { 1 } else { 0x55 };
    assert!(written.iter().all(|&byte| byte == expected), "{result:?}, and zeroes in the image");
    result
}

#[test]
fn zeroes_in_the_place_of_lost_memory_are_not_written() {
    // Bounced, since no device takes an odd address; as they are; looked at for zeroes.
    for (addr, direct, detect) in [
        (1, true, DetectZeroes::Off),
        (4096, false, DetectZeroes::Off),
        (4096, true, DetectZeroes::Unmap),
    ] {
        let (file, view) = guest();
        let (_stays, neighbour) = guest();
        assert_eq!(write(&view, addr, direct, detect), Ok(()));
        ftruncate(&file, 0).unwrap();
        // Nobody has noticed: the copy, the kernel, or the search for zeroes does.
        assert_eq!(write(&view, addr, direct, detect), Err(Errno::EFAULT));
        // Somebody has.
        assert_eq!(view.read_u8(0), Ok(0));
        assert_eq!(write(&view, addr, direct, detect), Err(Errno::EFAULT));
        assert_eq!(write(&neighbour, addr, direct, detect), Ok(()), "another guest's is there");
    }
}
