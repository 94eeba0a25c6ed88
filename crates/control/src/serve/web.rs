//! Options of `serve` for an image on a web server.

use std::path::PathBuf;

use block::options::{UrlOptions, is_url};

use super::{ServeFormat, ServeOptions};
use crate::error::OptionError;
use crate::object::{self, ObjectOptions};
use crate::shape::Shape;
use crate::table::{Field, Kind, Row, Syntax, put};

pub(crate) const OVERLAY: Field<ServeOptions> = Row::optional(
    "overlay",
    "the image is read-only, if it is on a web server",
    "qcow2 image that gets writes, and what is read, of an image on a web server; made when it is missing",
)
.path(|serve, path| put(&mut serve.overlay, Some(path)));

pub(super) const LOCALIZE: Field<ServeOptions> = Row::optional(
    "localize",
    "only what is read is copied",
    "copy the whole image to the overlay in the background; then the server is not needed any more",
)
.flag(|serve| serve.localize = serve.localize.or(Some(0)));

pub(super) const LOCALIZE_SPEED: Field<ServeOptions> =
    Row::optional("localize-speed", "no limit", "the same, with at most so many bytes per second")
        .bytes(|serve, bytes| put(&mut serve.localize, Some(bytes)));

pub(super) const CACHE_DIR: Field<ServeOptions> = Row::optional(
    "cache-dir",
    "no cache",
    "folder of caches, for an image on a web server: what is read is stored there, one file for each image, and kept; one \
     process at a time uses a file",
)
.path(|serve, path| put(&mut serve.cache_dir.folder, Some(path)));

pub(super) const CACHE_SIZE: Field<ServeOptions> = Row::optional(
    "cache-size",
    "no limit",
    "bytes that the image's cache takes up at most; then nothing more is stored",
)
.bytes(|serve, bytes| match bytes {
    0 => Err(OptionError::new("a cache needs room")),
    bytes => put(&mut serve.cache_dir.max_size, bytes),
});

pub(crate) const URL_OPTS: Field<ServeOptions> = Row::optional(
    "url-opts",
    "the driver's defaults",
    "options of the driver, http, https or s3, for an image on a web server: username=u,password-secret=s,timeout=9",
)
.of(Kind::Structure {
    meta: "<option>=<value>[,...]",
    syntax: Syntax::KeyvalOrJson,
    implied: None,
    shape: || Shape::Object(UrlOptions::more_members()),
    read: |serve, given, at| match serve.web.take() {
        Some(web) => put(&mut serve.web, Some(Box::new(web.with(given, at)?))),
        None => Err(OptionError::new("--url-opts: the image is not a URL")),
    },
});

pub(crate) const OBJECT: Field<ServeOptions> =
    Row::optional("object", "", "a secret, which --url-opts refers to by its id").of(
        Kind::Structure {
            meta: "secret,id=<id>,file=<file>",
            syntax: Syntax::KeyvalOrJson,
            implied: Some("qom-type"),
            shape: || {
                let mut types = object::options();
                types.variants.retain(|variant| variant.name == "secret");
                Shape::Union(types)
            },
            read: |serve, given, at| match object::read(given, at)? {
                ObjectOptions::Secret(secret) => {
                    serve.secrets.push(secret);
                    Ok(())
                }
                other @ (ObjectOptions::Iothread(_)
                | ObjectOptions::TlsCreds(_)
                | ObjectOptions::Authz(_)
                | ObjectOptions::ThrottleGroup(_)) => {
                    let name = other.type_name();
                    let why = format!("--object {name}: only objects of type secret are taken");
                    Err(OptionError::new(why))
                }
            },
        },
    );

/// Takes an image's name for a URL, if it is one.
pub(crate) fn start(mut serve: ServeOptions) -> Result<ServeOptions, OptionError> {
    if let Some(url) = serve.image.to_str().filter(|image| is_url(image)) {
        serve.web = Some(Box::new(UrlOptions::of_url(url)?));
    }
    Ok(serve)
}

/// Refuses what an image on a web server cannot be given, and what is for such an image only.
pub(super) fn check(serve: &ServeOptions) -> Result<(), OptionError> {
    let cache = &serve.cache_dir;
    match (&serve.web, &serve.overlay) {
        (None, _) if cache.folder.is_some() => {
            Err(OptionError::new("--cache-dir: the image is not a URL"))
        }
        _ if cache.folder.is_none() && cache.max_size != 0 => {
            Err(OptionError::new("--cache-size: there is no cache")
                .hint("Add --cache-dir <folder>."))
        }
        (None, Some(_)) => Err(OptionError::new("--overlay: the image is not a URL").hint(
            "qemu-img create -f qcow2 -b <image> -F <format> <overlay> makes an overlay of a file.",
        )),
        (None, None) if !serve.secrets.is_empty() => {
            Err(OptionError::new("--object: the image is not a URL, and has no use for secrets"))
        }
        (Some(_), _) if serve.size.is_some() => {
            Err(OptionError::new("--size: an image on a web server cannot be made"))
        }
        (_, None) if serve.localize.is_some() => {
            Err(OptionError::new("--localize: there is no overlay to copy the image to")
                .hint("--overlay <file> names one, which is made when it is missing."))
        }
        (Some(_), Some(_)) if serve.read_only => {
            Err(OptionError::new("--overlay: an overlay is for writing")
                .hint("Leave --read-only or --overlay out."))
        }
        _ => Ok(()),
    }
}

/// Most bytes of the image's name that a cache's name has.
const LONGEST: usize = 64;

impl ServeOptions {
    /// Returns the file of the image's cache. `None`: there is none.
    ///
    /// The name does not depend on the URL's query, which may be a signature. A cache has the contents of a disk, so another
    /// format is another disk.
    #[must_use]
    pub fn cache_file(&self, format: ServeFormat) -> Option<PathBuf> {
        let (folder, web) = (self.cache_dir.folder.as_ref()?, self.web.as_ref()?);
        let kind = match format {
            ServeFormat::Raw | ServeFormat::ProbedRaw => "raw",
            ServeFormat::Qcow2 => "qcow2",
        };
        let name = web.file_name().unwrap_or_default();
        let is_plain = |c: &char| c.is_ascii_alphanumeric() || ['.', '-', '_'].contains(c);
        let name: String = name.chars().filter(is_plain).take(LONGEST).collect();
        let hash = fnv1a(web.shown().bytes().chain(*b"\n").chain(kind.bytes()));
        Some(folder.join(format!("cache-{name}-{hash:016x}.qcow2")))
    }
}

/// FNV-1a, which stays the same in later versions. Two images with one hash would replace each other's cache.
fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
