//! Detects the format of an image from its first and last bytes.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::drivers::qcow2::is_qcow2;

/// Bytes that are examined at the start and at the end of an image.
pub(crate) const LOOKED_AT: usize = 512;
/// Magic of `qcow2` and of its predecessor `qcow`. The version follows.
const QCOW: &[u8] = b"QFI\xfb";

/// An image format with a signature. `raw` has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `bochs`.
    Bochs,
    /// `cloop`.
    Cloop,
    /// `dmg`. Detected by the last sector.
    Dmg,
    /// `luks`, version 1, which QEMU opens. Version 2 counts as a guest's own encryption of its
    /// disk.
    Luks,
    /// `parallels`.
    Parallels,
    /// `qcow`, the first version.
    Qcow,
    /// `qcow2`, versions 2 and 3.
    Qcow2,
    /// `qed`.
    Qed,
    /// `vdi`.
    Vdi,
    /// `vhdx`.
    Vhdx,
    /// `vmdk`: an image with data, or a description of other files.
    Vmdk,
    /// `vpc`, QEMU's name for VHD. Images of fixed size are detected by the last sector.
    Vpc,
}

impl Format {
    /// Detects the format from an image's first and last bytes.
    ///
    /// Takes at least 512 bytes of each, or the whole of a smaller image. `None`: raw, as far as
    /// signatures show.
    pub fn probe(start: &[u8], end: &[u8]) -> Option<Format> {
        let at = |offset: usize, signature: &[u8]| {
            start.get(offset..).is_some_and(|rest| rest.starts_with(signature))
        };
        let last = end.last_chunk::<LOOKED_AT>().map_or(&[][..], |last| last);
        Some(match () {
            () if is_qcow2(start) => Format::Qcow2,
            () if at(0, QCOW) && at(4, &[0, 0, 0, 1]) => Format::Qcow,
            () if at(0, b"QED\0") => Format::Qed,
            () if at(0, b"KDMV") || at(0, b"COWD") || at(0, b"# Disk DescriptorFile") => {
                Format::Vmdk
            }
            () if at(0, b"vhdxfile") => Format::Vhdx,
            () if at(64, &0xbeda_107f_u32.to_le_bytes()) => Format::Vdi,
            () if at(0, b"LUKS\xba\xbe\0\x01") => Format::Luks,
            () if at(0, b"WithoutFreeSpace") || at(0, b"WithouFreSpacExt") => Format::Parallels,
            () if at(0, b"Bochs Virtual HD Image\0") => Format::Bochs,
            () if at(0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop ") => Format::Cloop,
            () if at(0, b"conectix") || last.starts_with(b"conectix") => Format::Vpc,
            // After the magic: the version and the trailer's size.
            () if last.starts_with(b"koly\0\0\0\x04\0\0\x02\0") => Format::Dmg,
            () => return None,
        })
    }

    /// Detects the format of an image in a file or on a block device.
    ///
    /// `None`: raw, as far as signatures show.
    ///
    /// # Errors
    ///
    /// Those of pread(2).
    pub fn of_file(file: &File) -> io::Result<Option<Format>> {
        let size = io::Seek::seek(&mut &*file, io::SeekFrom::End(0))?;
        let (mut start, mut end) = ([0; LOOKED_AT], [0; LOOKED_AT]);
        let read = read_at(file, &mut start, 0)?;
        read_at(file, &mut end, size.saturating_sub(LOOKED_AT as u64))?;
        Ok(Format::probe(&start[..read], &end))
    }

    /// Returns the format that the file name's extension stands for. `None`: any.
    pub fn of_name(path: &Path) -> Option<Format> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        Some(match &*extension {
            "cloop" => Format::Cloop,
            "dmg" => Format::Dmg,
            "hdd" => Format::Parallels,
            "luks" => Format::Luks,
            "qcow" => Format::Qcow,
            "qcow2" => Format::Qcow2,
            "qed" => Format::Qed,
            "vdi" => Format::Vdi,
            "vhd" | "vpc" => Format::Vpc,
            "vhdx" => Format::Vhdx,
            "vmdk" => Format::Vmdk,
            _ => return None,
        })
    }

    /// Returns the format's name, as `qemu-img` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Format::Bochs => "bochs",
            Format::Cloop => "cloop",
            Format::Dmg => "dmg",
            Format::Luks => "luks",
            Format::Parallels => "parallels",
            Format::Qcow => "qcow",
            Format::Qcow2 => "qcow2",
            Format::Qed => "qed",
            Format::Vdi => "vdi",
            Format::Vhdx => "vhdx",
            Format::Vmdk => "vmdk",
            Format::Vpc => "vpc",
        }
    }
}

/// Reads into `bytes`, up to the end of the file.
pub(crate) fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(start: &[u8]) -> Option<Format> {
        Format::probe(start, start)
    }

    #[test]
    fn signatures_tell_formats() {
        let vdi = {
            let mut start = vec![0; 512];
            start[64..68].copy_from_slice(&[0x7f, 0x10, 0xda, 0xbe]);
            start
        };
        for (start, format) in [
            (&b"QFI\xfb\0\0\0\x03"[..], Format::Qcow2),
            (b"QFI\xfb\0\0\0\x02", Format::Qcow2),
            (b"QFI\xfb\0\0\0\x01", Format::Qcow),
            (b"QED\0", Format::Qed),
            (b"KDMV\x01\0\0\0", Format::Vmdk),
            (b"COWD", Format::Vmdk),
            (b"# Disk DescriptorFile\nversion=1", Format::Vmdk),
            (b"vhdxfile", Format::Vhdx),
            (&vdi, Format::Vdi),
            (b"LUKS\xba\xbe\0\x01", Format::Luks),
            (b"WithoutFreeSpace", Format::Parallels),
            (b"WithouFreSpacExt", Format::Parallels),
            (b"Bochs Virtual HD Image\0", Format::Bochs),
            (b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0", Format::Cloop),
            (b"conectix", Format::Vpc),
        ] {
            assert_eq!(probe(start), Some(format), "{}", String::from_utf8_lossy(start));
        }
        for start in [&b""[..], b"QFI", b"QFI\xfb\0\0\0\x04", b"LUKS\xba\xbe\0\x02", &[0; 512]] {
            assert_eq!(probe(start), None, "{start:?}");
        }
    }

    #[test]
    fn trailers_tell_formats() {
        for (signature, format) in
            [(&b"conectix"[..], Format::Vpc), (b"koly\0\0\0\x04\0\0\x02\0", Format::Dmg)]
        {
            let mut end = vec![0; 512];
            end[..signature.len()].copy_from_slice(signature);
            assert_eq!(Format::probe(&[0; 512], &end), Some(format));
            // Anywhere but at the start of the last sector, the same bytes are data.
            end.insert(0, 0);
            end.pop();
            assert_eq!(Format::probe(&[0; 512], &end), None);
        }
    }
}
