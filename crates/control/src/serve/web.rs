//! Options of `serve` for an image on a web server.

use block::options::{UrlOptions, is_url};

use super::ServeOptions;
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
    match (&serve.web, &serve.overlay) {
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
