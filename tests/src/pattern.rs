//! Blocks whose contents identify the disk's block and the generation of the write.

/// Size of a block in bytes.
pub const BLOCK: usize = 4096;

/// The contents of block `index` when it is written for the `generation`th time.
///
/// The first 16 bytes are the two numbers, which seed the noise in the rest. No two blocks have an equal sector, so a
/// block with a part of another one is detected.
pub fn block(index: u64, generation: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    block[..8].copy_from_slice(&index.to_le_bytes());
    block[8..16].copy_from_slice(&generation.to_le_bytes());
    let mut state = index ^ generation.rotate_left(32);
    for bytes in block[16..].chunks_exact_mut(8) {
        bytes.copy_from_slice(&splitmix64(&mut state).to_le_bytes());
    }
    block
}

/// Returns the generation of a block read from place `index` of the disk.
///
/// # Errors
///
/// Describes what is wrong, if [`block`] did not make the data for that place.
pub fn generation(index: u64, data: &[u8]) -> Result<u64, String> {
    let field = |at: usize| -> Result<u64, String> {
        let bytes = data.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        Ok(u64::from_le_bytes(bytes.ok_or("shorter than a block")?))
    };
    let (found, generation) = (field(0)?, field(8)?);
    if found != index {
        return Err(format!("block {index} holds what was written to block {found}"));
    }
    if data != block(index, generation) {
        return Err(format!("block {index} is a mixture, partly of generation {generation}"));
    }
    Ok(generation)
}

/// The next number of a pseudo-random sequence (Steele, Lea and Flood, 2014).
pub fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
