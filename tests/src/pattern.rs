//! Blocks whose contents identify the disk's block and the generation of the write.

use fastrand::Rng;

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
    Rng::with_seed(index ^ generation.rotate_left(32)).fill(&mut block[16..]);
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
