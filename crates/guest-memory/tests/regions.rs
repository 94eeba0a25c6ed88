//! Regions and sets of them: what is mapped, what is refused, how long it lives.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_memory::test_util::{USER_BASE, memfd_memory, memfd_region};
use guest_memory::{Error, GuestMemory, MappedRegion, MemoryView, Region};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

const PAGE: u64 = 4096;

fn map(guest_addr: u64, size: u64) -> Arc<MappedRegion> {
    Arc::new(memfd_region(guest_addr, size).unwrap().map().unwrap())
}

#[test]
fn region_begins_at_its_file_offset() {
    let whole = memfd_region(0, 4 * PAGE).unwrap();
    let fd = whole.fd.try_clone().unwrap();
    let whole = MemoryView::new(Arc::new(
        GuestMemory::from_regions([Arc::new(whole.map().unwrap())]).unwrap(),
    ));
    let offset = PAGE + 24;
    whole.write_bytes(offset, b"here").unwrap();

    let part = Region { guest_addr: 0, size: PAGE, user_addr: 0, mmap_offset: offset, fd };
    let part = GuestMemory::from_regions([Arc::new(part.map().unwrap())]).unwrap();
    let part = MemoryView::new(Arc::new(part));
    assert_eq!(&part.read_array::<4>(0).unwrap(), b"here");
    part.write_bytes(PAGE - 4, b"last").unwrap();
    assert_eq!(&whole.read_array::<4>(offset + PAGE - 4).unwrap(), b"last");
}

#[test]
fn region_on_huge_pages_need_not_begin_at_one() {
    let huge = 2 << 20;
    let flags = MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB;
    let fd = memfd_create(c"huge", flags).unwrap();
    nix::unistd::ftruncate(&fd, 2 * huge).unwrap();
    // Mapping such a file takes no huge page yet, touching it would.
    let region =
        Region { guest_addr: 0, size: 3 * PAGE, user_addr: 0, mmap_offset: huge as u64 + PAGE, fd };
    let mapped = region.map().unwrap();
    assert_eq!(mapped.host().as_ptr() as usize % huge as usize, PAGE as usize);
}

#[test]
fn refused_regions_are_named() {
    let region = |guest_addr, size, user_addr, mmap_offset| {
        let fd = memfd_region(0, 4 * PAGE).unwrap().fd;
        Region { guest_addr, size, user_addr, mmap_offset, fd }.map()
    };
    assert!(matches!(region(PAGE, 0, 0, 0), Err(Error::Empty { guest_addr: PAGE })));
    for (guest, user, offset) in
        [(u64::MAX - PAGE + 1, 0, 0), (0, u64::MAX - PAGE + 1, 0), (0, 0, u64::MAX - PAGE + 1)]
    {
        let refused = region(guest, PAGE, user, offset);
        assert!(matches!(refused, Err(Error::Overflow { .. })), "{refused:?}");
    }
    assert!(region(0, 4 * PAGE, 0, 0).is_ok());
    assert!(matches!(
        region(0, 4 * PAGE, 0, 1),
        Err(Error::BeyondFile { end: 16385, file_size: 16384, .. })
    ));
    assert!(matches!(region(0, 1 << 62, 0, 0), Err(Error::BeyondFile { .. })));
}

#[test]
fn mmap_failure_names_call_and_errno() {
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let region =
        Region { guest_addr: 0, size: PAGE, user_addr: 0, mmap_offset: 0, fd: OwnedFd::from(file) };
    let error = region.map().unwrap_err();
    assert!(matches!(&error, Error::Os { call: "mmap", source, .. }
        if source.raw_os_error() == Some(libc::EACCES)));
    assert!(error.to_string().contains("mmap: Permission denied"), "{error}");
}

#[test]
fn overlaps_are_refused_and_neighbours_are_not() {
    let [a, b, c] = [map(0, 2 * PAGE), map(2 * PAGE, PAGE), map(PAGE, PAGE)];
    let both = GuestMemory::from_regions([b.clone(), a.clone()]).unwrap();
    assert_eq!(both.regions().iter().map(|r| r.guest_addr()).collect::<Vec<_>>(), [0, 2 * PAGE]);
    assert!(matches!(both.with_region(c), Err(Error::Overlap { .. })));
    assert!(matches!(both.with_region(b), Err(Error::Overlap { .. })));

    let mut elsewhere = memfd_region(64 * PAGE, PAGE).unwrap();
    elsewhere.user_addr = USER_BASE + PAGE;
    let elsewhere = Arc::new(elsewhere.map().unwrap());
    assert!(matches!(both.with_region(elsewhere), Err(Error::Overlap { what: "user", .. })));
}

#[test]
fn regions_come_and_go() {
    let memory = GuestMemory::new().with_region(map(0, PAGE)).unwrap();
    let more = memory.with_region(map(8 * PAGE, 2 * PAGE)).unwrap();
    assert_eq!(more.regions().len(), 2);
    assert!(more.region_at(10 * PAGE - 1).is_some() && more.region_at(10 * PAGE).is_none());

    let user_addr = USER_BASE + 8 * PAGE;
    assert!(matches!(
        more.without_region(8 * PAGE, user_addr, PAGE),
        Err(Error::NoSuchRegion { .. })
    ));
    let less = more.without_region(8 * PAGE, user_addr, 2 * PAGE).unwrap();
    assert_eq!(less.regions().len(), 1);
    assert!(less.region_at(8 * PAGE).is_none());
}

#[test]
fn mapping_lives_until_its_last_user() {
    let region = map(0, PAGE);
    let dropped = Arc::downgrade(&region);
    let memory = Arc::new(GuestMemory::from_regions([region]).unwrap());
    let ring = memory.ring_area(USER_BASE, 16, 16).unwrap();
    let mut bufs = event_loop::IoBufs::new();
    MemoryView::new(memory).push_iovecs(0, 8, &mut bufs).unwrap();
    assert_eq!(bufs.copy_in(0, b"in use"), 6);
    drop(ring);
    assert!(dropped.upgrade().is_some());
    bufs.clear();
    assert!(dropped.upgrade().is_none());
}

#[test]
fn translation_between_guest_and_front_end() {
    let memory = memfd_memory(&[(0, 2 * PAGE), (4 * PAGE, PAGE)]).unwrap();
    assert_eq!(memory.user_to_guest(USER_BASE + 4 * PAGE, PAGE), Some(4 * PAGE));
    assert_eq!(memory.guest_to_user(PAGE, PAGE), Some(USER_BASE + PAGE));
    for (addr, len) in [(4 * PAGE, PAGE + 1), (3 * PAGE, 1), (5 * PAGE, 0), (0, u64::MAX)] {
        assert_eq!(memory.user_to_guest(USER_BASE + addr, len), None, "{addr:#x}");
        assert_eq!(memory.guest_to_user(addr, len), None, "{addr:#x}");
    }
    assert_eq!(memory.user_to_guest(USER_BASE - 1, 1), None);
}

#[test]
fn rings_are_inside_one_region_and_aligned() {
    let memory = memfd_memory(&[(0, PAGE), (PAGE, PAGE)]).unwrap();
    let ring = memory.ring_area(USER_BASE + PAGE + 16, 32, 16).unwrap();
    assert_eq!((ring.guest_addr(), ring.len()), (PAGE + 16, 32));
    let across = memory.ring_area(USER_BASE + PAGE - 16, 32, 16);
    assert!(matches!(across, Err(Error::RingOutside { .. })));
    let odd = memory.ring_area(USER_BASE + 8, 32, 16);
    assert!(matches!(odd, Err(Error::RingMisaligned { align: 16, .. })));
}

/// Drops a region while the thread that drops large ones is busy. Returns whether it was still mapped, and waits for its
/// end.
fn is_mapped_after_its_drop(region: MappedRegion) -> bool {
    let at = region.host().as_ptr() as usize;
    let is_mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| line.starts_with(&format!("{at:x}-")))
    };
    assert!(is_mapped());
    struct OnDrop<F: FnMut()>(F);
    impl<F: FnMut()> Drop for OnDrop<F> {
        fn drop(&mut self) {
            (self.0)();
        }
    }
    let (go_on, wait) = std::sync::mpsc::channel::<()>();
    guest_memory::release(OnDrop(move || wait.recv().unwrap()));
    drop(region);
    let was_mapped = is_mapped();
    let (end, ended) = std::sync::mpsc::channel();
    guest_memory::release(OnDrop(move || end.send(()).unwrap()));
    go_on.send(()).unwrap();
    ended.recv().unwrap();
    assert!(!is_mapped());
    was_mapped
}

#[test]
#[cfg(not(miri))]
fn a_thread_of_its_own_unmaps_large_regions() {
    // Several calls of munmap(2), the last one for a part.
    assert!(is_mapped_after_its_drop(memfd_region(0, (64 << 20) + PAGE).unwrap().map().unwrap()));
    assert!(!is_mapped_after_its_drop(memfd_region(0, 4 * PAGE).unwrap().map().unwrap()));
}

#[test]
#[cfg(not(miri))]
fn a_thread_of_its_own_closes_large_files() {
    let mut region = memfd_region(0, 8 << 20).unwrap();
    nix::fcntl::fallocate(&region.fd, nix::fcntl::FallocateFlags::empty(), 0, 8 << 20).unwrap();
    region.size = PAGE;
    assert!(is_mapped_after_its_drop(region.map().unwrap()));
}

/// Accesses to memory in a file on a disk may wait for the disk.
#[test]
#[cfg_attr(miri, ignore = "Miri has no file systems")]
fn files_on_disks_are_told_from_memory() {
    assert!(!map(0, 4096).is_on_disk());
    let name = format!("{}/region-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    let file = File::options().create_new(true).read(true).write(true).open(&name).unwrap();
    std::fs::remove_file(&name).unwrap();
    file.set_len(4096).unwrap();
    let is_memory = fstatfs(&file).unwrap().filesystem_type() == TMPFS_MAGIC;
    let fd = file.into();
    let region = Region { guest_addr: 0, size: 4096, user_addr: 0, mmap_offset: 0, fd };
    match region.map() {
        Ok(region) => assert_eq!(region.is_on_disk(), !is_memory),
        // Such as an overlay in a container.
        Err(error) => assert!(matches!(error, Error::Elsewhere { .. }), "{error}"),
    }
}
