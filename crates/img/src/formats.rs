//! The options with which images of a format are made: `qemu-img`'s names, and those of `blockdev-create`.

use std::fmt::Write as _;

use options::scalar;

use crate::error::Error;

/// A format in which images are made.
pub(crate) struct Format {
    pub(crate) name: &'static str,
    /// In the order in which QEMU prints them.
    pub(crate) options: &'static [Known],
}

/// The type of an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    Bool,
    Size,
    Number,
}

/// An option.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) name: &'static str,
    /// The name in `blockdev-create`.
    pub(crate) to: &'static str,
    kind: Kind,
    /// What QEMU prints if it is not given. Empty: nothing.
    default: &'static str,
    help: &'static str,
}

const fn known(
    name: &'static str,
    to: &'static str,
    kind: Kind,
    default: &'static str,
    help: &'static str,
) -> Known {
    Known { name, to, kind, default, help }
}

const fn text(name: &'static str, to: &'static str, help: &'static str) -> Known {
    known(name, to, Kind::Text, "", help)
}

const SIZE: Known = known("size", "size", Kind::Size, "", "Virtual disk size");

static FORMATS: &[Format] = &[
    Format {
        name: "raw",
        options: &[
            SIZE,
            known("nocow", "nocow", Kind::Bool, "", "Overwrite in place (on btrfs)"),
            text("preallocation", "preallocation", "What is allocated: off, falloc, full"),
            known(
                "extent_size_hint",
                "extent-size-hint",
                Kind::Size,
                "",
                "Bytes that are allocated at a time (on XFS), 0 for the default",
            ),
        ],
    },
    Format {
        name: "qcow2",
        options: &[
            text("encrypt.format", "encrypt.format", "How data is encrypted: luks"),
            text("encrypt.key-secret", "encrypt.key-secret", "ID of the secret with the password"),
            text("encrypt.cipher-alg", "encrypt.cipher-alg", "The cipher"),
            text("encrypt.cipher-mode", "encrypt.cipher-mode", "Its mode of operation"),
            text("encrypt.ivgen-alg", "encrypt.ivgen-alg", "How initialisation vectors are made"),
            text("encrypt.ivgen-hash-alg", "encrypt.ivgen-hash-alg", "The digest for those"),
            text("encrypt.hash-alg", "encrypt.hash-alg", "The digest for keys"),
            known(
                "encrypt.iter-time",
                "encrypt.iter-time",
                Kind::Number,
                "",
                "Milliseconds to derive a key",
            ),
            known("cluster_size", "cluster-size", Kind::Size, "65536", "Bytes of a cluster"),
            known("extended_l2", "extended-l2", Kind::Bool, "off", "Clusters have subclusters"),
            text(
                "preallocation",
                "preallocation",
                "What is allocated: off, metadata, falloc, full",
            ),
            known(
                "compression_type",
                "compression-type",
                Kind::Text,
                "zlib",
                "Compression of clusters: zlib, zstd",
            ),
            SIZE,
            text("compat", "version", "Version of the format: v2 (0.10) or v3 (1.1)"),
            text("backing_file", "backing-file", "The image that this one is above"),
            text("backing_fmt", "backing-fmt", "The format of that image"),
            text("data_file", "data-file", "The file that has the data"),
            known(
                "data_file_raw",
                "data-file-raw",
                Kind::Bool,
                "",
                "That file by itself is a raw image of the disk",
            ),
            known("lazy_refcounts", "lazy-refcounts", Kind::Bool, "off", "Mark the image so"),
            known(
                "refcount_bits",
                "refcount-bits",
                Kind::Number,
                "16",
                "Bits of a reference count",
            ),
        ],
    },
    Format {
        name: "luks",
        options: &[
            SIZE,
            text("key-secret", "key-secret", "ID of the secret with the password"),
            text("cipher-alg", "cipher-alg", "The cipher"),
            text("cipher-mode", "cipher-mode", "Its mode of operation"),
            text("ivgen-alg", "ivgen-alg", "How initialisation vectors are made"),
            text("ivgen-hash-alg", "ivgen-hash-alg", "The digest for those"),
            text("hash-alg", "hash-alg", "The digest for keys"),
            known("iter-time", "iter-time", Kind::Number, "", "Milliseconds to derive a key"),
            text("preallocation", "preallocation", "What is allocated: off, falloc, full"),
        ],
    },
];

/// Returns the format of that name.
///
/// # Errors
///
/// There is none that is made.
pub(crate) fn find(name: &str) -> Result<&'static Format, Error> {
    let found = FORMATS.iter().find(|format| format.name == name);
    found.ok_or_else(|| {
        let names: Vec<_> = FORMATS.iter().map(|format| format.name).collect();
        let made = format!("Images are made in the formats {}.", names.join(", "));
        Error::new(format!("Unknown file format '{name}'")).with_hint(made)
    })
}

/// Returns the list of a format's options, for people.
///
/// # Errors
///
/// No image of that format is made.
pub fn list_options(format: &str) -> Result<String, Error> {
    let format = find(format)?;
    let mut text = format!("Supported {} options:\n", format.name);
    let mut options: Vec<&Known> = format.options.iter().collect();
    options.sort_by_key(|option| option.name);
    for Known { name, kind, help, .. } in options {
        let value = match kind {
            Kind::Text => "<str>",
            Kind::Bool => "<bool (on/off)>",
            Kind::Size => "<size>",
            Kind::Number => "<num>",
        };
        let usage = format!("{name}={value}");
        // Writing to a string does not fail.
        let _ = writeln!(text, "  {usage:<22} - {help}");
    }
    Ok(text)
}

impl Format {
    pub(crate) fn find(&self, name: &str) -> Option<&'static Known> {
        self.options.iter().find(|known| known.name == name)
    }

    pub(crate) fn names(&self) -> String {
        let names: Vec<_> = self.options.iter().map(|known| known.name).collect();
        format!("Options of {}: {}", self.name, names.join(", "))
    }
}

impl Known {
    /// Returns what QEMU prints of a value. `None`: nothing.
    pub(crate) fn shown(&self, value: Option<String>) -> Option<String> {
        let value = match (value, self.default) {
            (None, "") => return None,
            (None, default) => return Some(default.to_owned()),
            (Some(value), _) => value,
        };
        let size = (self.kind == Kind::Size).then(|| scalar::size(&value)).flatten();
        Some(size.map_or(value, |size| size.to_string()))
    }

    /// Checks a value's type. The words are QEMU's.
    pub(crate) fn check(&self, value: &str) -> Result<(), Error> {
        let name = self.name;
        let is_right = match self.kind {
            Kind::Text => true,
            Kind::Bool => scalar::boolean(value).is_some(),
            Kind::Size => scalar::size(value).is_some(),
            Kind::Number => scalar::integer(value).is_some(),
        };
        let expected = match self.kind {
            _ if is_right => return Ok(()),
            Kind::Text => return Ok(()),
            Kind::Bool => "'on' or 'off'",
            Kind::Size => "a non-negative number below 2^64",
            Kind::Number => "a number",
        };
        Err(Error::new(format!("Parameter '{name}' expects {expected}")))
    }

    /// Returns the value as `blockdev-create` takes it.
    pub(crate) fn written<'a>(&self, value: &'a str) -> &'a str {
        match (self.name, value) {
            ("compat", "0.10") => "v2",
            ("compat", "1.1") => "v3",
            (_, value) => value,
        }
    }

    /// Whether an image of that format has the option from the file that has its bytes.
    pub(crate) fn is_of_file(&self, format: &str) -> bool {
        format == "raw" && self.name != "size"
    }
}
