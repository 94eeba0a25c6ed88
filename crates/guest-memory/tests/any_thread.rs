//! Access without a view: over neighbours, up to holes, at the end of the address space.

use guest_memory::AccessError;
use guest_memory::test_util::memfd_memory;

#[test]
fn copies_cross_neighbours_and_stop_at_holes() {
    let memory = memfd_memory(&[(0x1000, 0x1000), (0x2000, 0x1000), (0x4000, 0x1000)]).unwrap();
    let bytes: Vec<u8> = (0..100).collect();
    memory.write_bytes(0x2000 - 37, &bytes).unwrap();
    let mut back = [0; 100];
    memory.read_bytes(0x2000 - 37, &mut back).unwrap();
    assert_eq!(back[..], bytes);
    assert_eq!(
        memory.read_bytes(0x3000 - 1, &mut back),
        Err(AccessError { addr: 0x3000, len: 99 })
    );
    assert_eq!(memory.write_bytes(0x3000, &[1]), Err(AccessError { addr: 0x3000, len: 1 }));
    assert!(memory.read_bytes(u64::MAX, &mut back).is_err());
    assert_eq!(memory.read_bytes(0x3000, &mut []), Ok(()), "nothing is anywhere");
}
