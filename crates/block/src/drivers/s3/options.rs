//! Options of `s3`.

use ::options::place::{Checked, Of, OneOf, Text};
use ::options::shape::Member;
use ::options::table::{Context, Field, Row};
use ::options::{Object, OptionError};

use super::place::{self, Place};
use crate::driver::{DriverKind, OptionTable};
use crate::drivers::web::{OnWeb, WebOptions, more_members, read_more};
use crate::options::Driver;

pub(in crate::drivers) static S3: DriverKind = DriverKind {
    name: "s3",
    help: "an object in an S3 store, for reading",
    example: "s3,node-name=n,bucket=images,key=debian-13.qcow2,read-only=on",
    options: &OptionTable { fields: FIELDS, start: |_| S3Options::default(), build },
    create: None,
    amend: None,
    library: None,
};

/// How the URL of an object names the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressingStyle {
    /// `https://HOST/BUCKET/KEY`.
    Path,
    /// `https://BUCKET.HOST/KEY`.
    VirtualHosted,
}

/// Options of `s3`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct S3Options {
    /// `bucket`.
    pub bucket: String,
    /// `key`: the object's name.
    pub key: String,
    /// `region`.
    pub region: Option<String>,
    /// `endpoint`: the URL of the store.
    pub endpoint: Option<String>,
    /// `addressing-style`.
    pub addressing_style: Option<AddressingStyle>,
    /// `access-key`.
    pub access_key: Option<String>,
    /// `secret-key-secret`: the `id` of the secret with the secret key.
    pub secret_key_secret: Option<String>,
    /// `session-token-secret`: the `id` of the secret with the session token.
    pub session_token_secret: Option<String>,
    /// `anonymous`: questions are not signed.
    pub anonymous: bool,
    /// The options of all images on web servers.
    pub web: WebOptions,
    /// Where the object is, by the options and the environment.
    pub(super) place: Place,
}

impl S3Options {
    /// Returns the options of an image, with the defaults of all but its URL: `s3://BUCKET/KEY`.
    ///
    /// The key is written as it is, not encoded.
    ///
    /// # Errors
    ///
    /// There is no bucket or no key, or the environment names no region or no endpoint.
    pub fn of_url(url: &str) -> Result<S3Options, OptionError> {
        let name = url.get("s3://".len()..).unwrap_or_default();
        let Some((bucket, key)) = name.split_once('/').filter(|(_, key)| !key.is_empty()) else {
            return Err(OptionError::new(format!("'{url}' names no object: s3://<bucket>/<key>")));
        };
        place::check_bucket(bucket)?;
        place::check_key(key)?;
        finish(S3Options { bucket: bucket.into(), key: key.into(), ..S3Options::default() })
    }

    /// Takes more options than the URL.
    ///
    /// # Errors
    ///
    /// An option is unknown, wrong or contradicts another one.
    pub fn with(mut self, more: Object, at: &Context) -> Result<S3Options, OptionError> {
        read_more((FIELDS, S3.name, OF_URL), &mut self, more, at)?;
        finish(self)
    }

    /// Returns the options that [`with`](Self::with) takes.
    #[must_use]
    pub fn more_members() -> Vec<Member> {
        more_members(FIELDS, OF_URL)
    }

    /// Returns the object's URL: `s3://BUCKET/KEY`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("s3://{}/{}", self.bucket, self.key)
    }

    /// Returns the last part of the key. `None`: there is none.
    #[must_use]
    pub fn file_name(&self) -> Option<String> {
        self.key.rsplit('/').next().filter(|name| !name.is_empty()).map(str::to_owned)
    }

    /// Returns the options as a driver's.
    #[must_use]
    pub fn driver(self) -> Driver {
        self.into()
    }
}

/// The options that a URL has.
const OF_URL: &[&str] = &["bucket", "key"];

fn build(options: S3Options) -> Result<Driver, OptionError> {
    finish(options).map(Driver::from)
}

fn finish(options: S3Options) -> Result<S3Options, OptionError> {
    let place = Place::of(&options, &place::environment)?;
    Ok(S3Options { place, ..options })
}

impl OnWeb for S3Options {
    fn web(&mut self) -> &mut WebOptions {
        &mut self.web
    }
}

pub(super) static FIELDS: &[Field<S3Options>] = &[
    Row::required("bucket", "the bucket that has the image").at(&Checked {
        meta: "<name>",
        check: |bucket: &String| place::check_bucket(bucket),
        at: |node: &mut S3Options| &mut node.bucket,
    }),
    Row::required("key", "the image's name in the bucket, as it is: not encoded").at(&Checked {
        meta: "<name>",
        check: |key: &String| place::check_key(key),
        at: |node: &mut S3Options| &mut node.key,
    }),
    Row::optional(
        "region",
        "AWS_REGION in the daemon's environment, or us-east-1",
        "the store's region, which signatures have",
    )
    .at(&Text("<name>", |node: &mut S3Options| &mut node.region)),
    Row::optional(
        "endpoint",
        "AWS_ENDPOINT_URL in the daemon's environment, or https://s3.<region>.amazonaws.com",
        "where the store is",
    )
    .at(&Text("https://<host>/<path>", |node: &mut S3Options| &mut node.endpoint)),
    Row::optional(
        "addressing-style",
        "path with an endpoint, or if the bucket's name cannot be that of a host; else virtual-hosted",
        "how the URL of an object names the bucket",
    )
    .at(&OneOf {
        at: |node: &mut S3Options| &mut node.addressing_style,
        words: &[
            ("path", AddressingStyle::Path, "https://<host>/<bucket>/<key>"),
            ("virtual-hosted", AddressingStyle::VirtualHosted, "https://<bucket>.<host>/<key>"),
        ],
    }),
    Row::optional(
        "access-key",
        "AWS_ACCESS_KEY_ID in the daemon's environment, or the profile's",
        "the id of the key that signs",
    )
    .at(&Text("<name>", |node: &mut S3Options| &mut node.access_key)),
    Row::optional(
        "secret-key-secret",
        "AWS_SECRET_ACCESS_KEY in the daemon's environment, or the profile's",
        "the secret object with the key that signs, for access-key",
    )
    .at(&Text("<id>", |node: &mut S3Options| &mut node.secret_key_secret)),
    Row::optional(
        "session-token-secret",
        "no token with access-key; else AWS_SESSION_TOKEN, or the profile's",
        "the secret object with the token of a key for a limited time",
    )
    .at(&Text("<id>", |node: &mut S3Options| &mut node.session_token_secret)),
    Row::default("anonymous", "off", "ask without a signature, for objects that all may read")
        .at(&Of(|node: &mut S3Options| &mut node.anonymous)),
    S3Options::READAHEAD,
    S3Options::TIMEOUT,
    S3Options::PROXY_USERNAME,
    S3Options::PROXY_PASSWORD_SECRET,
    S3Options::SSLVERIFY,
    S3Options::RECONNECT_DELAY,
    S3Options::OPEN_TIMEOUT,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_bucket_and_key_as_they_are() {
        let options = S3Options::of_url("S3://images/a/b c%20+ü.img").unwrap();
        assert_eq!((&*options.bucket, &*options.key), ("images", "a/b c%20+ü.img"));
        assert_eq!(options.url(), "s3://images/a/b c%20+ü.img");
        assert_eq!(options.file_name().as_deref(), Some("b c%20+ü.img"));
        for url in ["s3://", "s3://b", "s3://b/", "s3:///k", "s3://../k", "s3://b/a/../c"] {
            assert!(S3Options::of_url(url).is_err(), "{url}");
        }
    }
}
