//! The rows of the table: what is copied, and to what.

/// An image that is read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Image {
    Raw,
    Qcow2,
    /// qcow2, compressed with deflate.
    Deflate,
    /// qcow2, compressed with zstd.
    Zstd,
    /// Raw, most of it holes.
    Sparse,
    /// Raw, by an NBD server.
    Served,
}

/// A copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) source: Image,
    pub(super) target: Image,
    /// Past the page cache.
    pub(super) direct: bool,
}

/// All of them.
pub(super) fn rows() -> Vec<Row> {
    use Image::{Deflate, Qcow2, Raw, Served, Sparse, Zstd};
    let row = |name, source, target| Row { name, source, target, direct: false };
    vec![
        row("raw to raw", Raw, Raw),
        row("raw to qcow2", Raw, Qcow2),
        Row { direct: true, ..row("raw to qcow2, O_DIRECT", Raw, Qcow2) },
        row("qcow2 to raw", Qcow2, Raw),
        row("qcow2 to qcow2", Qcow2, Qcow2),
        row("sparse raw to qcow2", Sparse, Qcow2),
        row("raw to deflate", Raw, Deflate),
        row("deflate to raw", Deflate, Raw),
        row("raw to zstd", Raw, Zstd),
        row("zstd to raw", Zstd, Raw),
        row("NBD to raw", Served, Raw),
        row("raw to NBD", Raw, Served),
    ]
}

impl Row {
    /// Whether an NBD server has one of the images.
    pub(super) fn is_served(&self) -> bool {
        [self.source, self.target].contains(&Image::Served)
    }

    /// The options of the conversion, the same for all programs that convert.
    pub(super) fn options(&self) -> Vec<&'static str> {
        let mut options =
            vec!["convert", "-q", "-W", "-f", self.source.format(), "-O", self.target.format()];
        options.extend(self.target.create_options());
        if self.target == Image::Served {
            options.push("-n");
        }
        if self.direct {
            options.extend(["-t", "none", "-T", "none"]);
        }
        options
    }
}

impl Image {
    pub(super) fn format(self) -> &'static str {
        match self {
            Self::Raw | Self::Sparse | Self::Served => "raw",
            Self::Qcow2 | Self::Deflate | Self::Zstd => "qcow2",
        }
    }

    /// Options of a conversion to such an image.
    pub(super) fn create_options(self) -> &'static [&'static str] {
        match self {
            Self::Deflate => &["-c", "-o", "compression_type=zlib"],
            Self::Zstd => &["-c", "-o", "compression_type=zstd"],
            _ => &[],
        }
    }

    /// The name of its file. A server has a raw file.
    pub(super) fn file(self) -> &'static str {
        match self {
            Self::Raw | Self::Served => "img-source.raw",
            Self::Sparse => "img-sparse.raw",
            Self::Qcow2 => "img-source.qcow2",
            Self::Deflate => "img-deflate.qcow2",
            Self::Zstd => "img-zstd.qcow2",
        }
    }
}
