//! A front end that shrinks its file affects only its own guest.

#![allow(unsafe_code)]

use std::process::Command;
use std::sync::Arc;

use guest_memory::test_util::{USER_BASE, memfd_region};
use guest_memory::{GuestMemory, MappedRegion, MemoryView, losses};
use nix::unistd::ftruncate;

const SIZE: u64 = 1 << 20;

fn region(addr: u64) -> (std::os::fd::OwnedFd, Arc<MappedRegion>) {
    let region = memfd_region(addr, SIZE).unwrap();
    let file = region.fd.try_clone().unwrap();
    (file, Arc::new(region.map().unwrap()))
}

#[test]
fn memory_that_is_taken_away_is_replaced() {
    let (file, taken) = region(0);
    let (_, stays) = region(SIZE);
    let (_, other_guest) = region(0);
    let memory = GuestMemory::from_regions([taken.clone(), stays.clone()]).unwrap();
    let view = MemoryView::new(Arc::new(memory));
    let ring = view.memory().ring_area(USER_BASE, 64, 64).unwrap();
    view.write_bytes(SIZE - 2, &[1, 2, 3, 4]).unwrap();
    let before = losses();
    ftruncate(&file, 0).unwrap();
    assert!(!taken.is_lost(), "no access has found the loss yet");
    let mut bytes = [9; 4];
    view.read_bytes(SIZE - 2, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 0, 3, 4], "zeroes, and the next region is as it was");
    assert!(taken.is_lost() && !stays.is_lost() && !other_guest.is_lost());
    assert_eq!(view.memory().lost_region().map(MappedRegion::guest_addr), Some(0));
    assert!(losses() > before);
    // The memory is still accessible through all kept addresses.
    view.write_bytes(0, &[7]).unwrap();
    assert_eq!(view.read_u8(0).unwrap(), 7);
    assert_eq!(ring.len(), 64);
    drop((view, ring, taken));
    // Another mapping reuses its index in the table and is not lost.
    let (_, next) = region(0);
    assert!(!next.is_lost());
}

#[test]
fn memory_that_many_use_is_taken_away_at_once() {
    let (file, taken) = region(0);
    let memory = Arc::new(GuestMemory::from_regions([taken]).unwrap());
    let barrier = std::sync::Barrier::new(5);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (memory, barrier) = (memory.clone(), &barrier);
            scope.spawn(move || {
                let view = MemoryView::new(memory);
                barrier.wait();
                for round in 0..1000u64 {
                    let addr = (thread * 4096 + round * 64) % SIZE;
                    view.write_bytes(addr, &round.to_le_bytes()).unwrap();
                }
            });
        }
        barrier.wait();
        ftruncate(&file, 0).unwrap();
    });
    let view = MemoryView::new(memory.clone());
    view.write_bytes(0, &[1]).unwrap();
    assert!(memory.lost_region().is_some());
}

/// Faults outside of guest memory still end the process.
#[test]
fn other_bus_errors_are_not_swallowed() {
    const CHILD: &str = "RINGMILL_TEST_BUS_ERROR";
    let (_, ours) = region(0);
    assert!(!ours.is_lost());
    if std::env::var_os(CHILD).is_some() {
        return fault_elsewhere();
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "bus_error::other_bus_errors_are_not_swallowed"])
        .env(CHILD, "1")
        .status()
        .unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&child);
    assert_eq!(signal, Some(libc::SIGBUS), "{child}");
}

fn fault_elsewhere() {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::mman::{MapFlags, ProtFlags, mmap};
    let file = memfd_create("empty", MFdFlags::empty()).unwrap();
    let len = std::num::NonZeroUsize::new(4096).unwrap();
    // SAFETY: a new mapping without other users; the read of it causes the intended fault.
    unsafe {
        let page = mmap(None, len, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, &file, 0).unwrap();
        page.cast::<u8>().read_volatile();
    }
}
