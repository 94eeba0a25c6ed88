//! Where an object is: its URL, by the options and the environment.

use std::env;

use ::options::OptionError;
use crypto::sigv4::encode_path;
use reqwest::Url;

use super::options::{AddressingStyle, S3Options};
use crate::drivers::web::{server, shown};

/// The region of a store that has none.
const REGION: &str = "us-east-1";
/// The longest key, bytes: S3's limit.
const MAX_KEY: usize = 1024;
/// The longest name of a bucket, bytes: S3's limit of the early years.
const MAX_BUCKET: usize = 255;

/// Where an object is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) region: String,
    /// The URL that is asked.
    pub(super) url: String,
    pub(super) host: String,
    pub(super) port: u16,
}

/// Returns a variable of the environment that is set to some text.
pub(super) fn environment(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

impl Place {
    /// Finds the object. `environment` has the variables.
    pub(super) fn of(
        options: &S3Options,
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Place, OptionError> {
        let first = |names: &[&'static str]| {
            names.iter().find_map(|name| Some((environment(name)?, *name)))
        };
        let region = options.region.clone().map(|region| (region, "region"));
        let region = region.or_else(|| first(&["AWS_REGION", "AWS_DEFAULT_REGION"]));
        let (region, origin) = region.unwrap_or_else(|| (REGION.to_owned(), "region"));
        if !is_region(&region) {
            return Err(OptionError::new(format!("{origin} '{region}' is not a region's name"))
                .hint("Letters, digits, '-' and '_', such as us-east-1."));
        }
        let endpoint = options.endpoint.clone().map(|endpoint| (endpoint, "endpoint"));
        let endpoint = endpoint.or_else(|| first(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]));
        let (mut url, has_endpoint) = match endpoint {
            Some((endpoint, origin)) => (read_endpoint(&endpoint, origin)?, true),
            None => {
                let aws = format!("https://s3.{region}.amazonaws.com");
                (read_endpoint(&aws, "region")?, false)
            }
        };
        let (bucket, key) = (&options.bucket, &options.key);
        let style = options.addressing_style.unwrap_or(match has_endpoint || !is_label(bucket) {
            true => AddressingStyle::Path,
            false => AddressingStyle::VirtualHosted,
        });
        let base = url.path().trim_end_matches('/').to_owned();
        let path = match style {
            AddressingStyle::Path => format!("{base}/{}/{}", encode_path(bucket), encode_path(key)),
            AddressingStyle::VirtualHosted => {
                let refused = |why: &str| {
                    OptionError::new(format!("addressing-style=virtual-hosted: {why}"))
                        .hint("addressing-style=path names the bucket in the path.")
                };
                let domain = url.domain().ok_or_else(|| {
                    refused(&format!("a bucket cannot be in front of '{}'", shown(&url)))
                })?;
                let is_host = bucket.split('.').all(is_label);
                let host = format!("{bucket}.{domain}");
                if !is_host || url.set_host(Some(&host)).is_err() {
                    let why = format!("bucket '{bucket}' cannot be a part of a host's name");
                    return Err(refused(&why));
                }
                format!("{base}/{}", encode_path(key))
            }
        };
        url.set_path(&path);
        // The signature covers the path that was made here: the URL must not have changed it.
        if url.path() != path {
            return Err(OptionError::new(format!("key '{key}' cannot be the path of a URL")));
        }
        let unnamed = || OptionError::new("Parameter 'endpoint' names no host");
        let (host, port) = server(&url).ok_or_else(unnamed)?;
        Ok(Place { region, url: url.into(), host, port })
    }
}

/// Checks that a name can be a bucket's.
pub(super) fn check_bucket(bucket: &str) -> Result<(), OptionError> {
    let is_wrong = bucket.contains(|c: char| c == '/' || c.is_control());
    match bucket {
        "" | "." | ".." => Err(format!("'{bucket}' is not a bucket's name")),
        _ if is_wrong || bucket.len() > MAX_BUCKET => Err("this is not a bucket's name".to_owned()),
        _ => Ok(()),
    }
    .map_err(|why| OptionError::new(format!("Parameter 'bucket': {why}")))
}

/// Checks that a key can be asked for.
pub(super) fn check_key(key: &str) -> Result<(), OptionError> {
    let why = match key {
        "" => "an object has a name",
        _ if key.len() > MAX_KEY => "keys have at most 1024 bytes",
        // Clients and proxies take these parts out of a path.
        _ if key.split('/').any(|part| part == "." || part == "..") => {
            "a URL cannot have '.' and '..' as parts of a path"
        }
        _ => return Ok(()),
    };
    Err(OptionError::new(format!("Parameter 'key': {why}")))
}

/// Returns whether a store's region can have that name.
pub(super) fn is_region(name: &str) -> bool {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=64).contains(&name.len()) && name.bytes().all(is_of_name)
}

/// Returns whether a name can be a part of a host's, between dots.
fn is_label(name: &str) -> bool {
    let is_of_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&name.len())
        && name.bytes().all(is_of_name)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn read_endpoint(endpoint: &str, origin: &str) -> Result<Url, OptionError> {
    let wrong = |why: &str| OptionError::new(format!("{origin}: {why}"));
    let url = Url::parse(endpoint).map_err(|error| wrong(&format!("not a URL: {error}")))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(wrong(&format!("'{}' does not start with 'https://'", shown(&url))));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong("the URL has a user in it, which logs and queries would show")
            .hint("access-key and secret-key-secret name the key that signs."));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(wrong("the URL of a store has no query"));
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(bucket: &str, key: &str) -> S3Options {
        S3Options { bucket: bucket.into(), key: key.into(), ..S3Options::default() }
    }

    fn url_of(options: &S3Options) -> String {
        Place::of(options, &|_| None).unwrap().url
    }

    #[test]
    fn the_bucket_is_in_the_host_or_in_the_path() {
        let plain = options("images", "a b/ü+%.img");
        let key = "a%20b/%C3%BC%2B%25.img";
        assert_eq!(url_of(&plain), format!("https://images.s3.us-east-1.amazonaws.com/{key}"));
        let with = |endpoint: &str, style| {
            let endpoint = Some(endpoint.to_owned());
            S3Options { endpoint, addressing_style: style, ..plain.clone() }
        };
        let of = |endpoint: &str, style| url_of(&with(endpoint, style));
        let virtual_hosted = Some(AddressingStyle::VirtualHosted);
        assert_eq!(of("http://[::1]:7480", None), format!("http://[::1]:7480/images/{key}"));
        assert_eq!(of("http://h:80/", virtual_hosted), format!("http://images.h/{key}"));
        assert_eq!(of("https://h/s3/", None), format!("https://h/s3/images/{key}"));
        assert_eq!(of("https://h/s3", virtual_hosted), format!("https://images.h/s3/{key}"));
        // A certificate for `*.s3.…` is for one label only.
        let dots = options("my.images", "a");
        assert_eq!(url_of(&dots), "https://s3.us-east-1.amazonaws.com/my.images/a");
        assert_eq!(
            url_of(&options("My_images", "a//b/")),
            "https://s3.us-east-1.amazonaws.com/My_images/a//b/"
        );
        let path = S3Options { addressing_style: Some(AddressingStyle::Path), ..plain.clone() };
        assert_eq!(url_of(&path), format!("https://s3.us-east-1.amazonaws.com/images/{key}"));
        for wrong in [
            with("http://127.0.0.1", virtual_hosted),
            with("ftp://h", None),
            with("https://u:p4ss@h", None),
            with("https://h?p4ss", None),
            with("h:9000", None),
            S3Options { addressing_style: virtual_hosted, ..options("My_images", "a") },
            S3Options { region: Some("eu west".into()), ..plain.clone() },
        ] {
            let error = Place::of(&wrong, &|_| None).unwrap_err();
            assert!(!error.message.contains("p4ss"), "{error}");
        }
    }

    #[test]
    fn the_environment_says_what_options_do_not() {
        let environment = |name: &str| match name {
            "AWS_REGION" => Some("eu-west-1".to_owned()),
            "AWS_ENDPOINT_URL" => Some("https://store.example".to_owned()),
            _ => None,
        };
        let place = Place::of(&options("images", "a"), &environment).unwrap();
        assert_eq!((&*place.region, &*place.url), ("eu-west-1", "https://store.example/images/a"));
        let given = S3Options {
            region: Some("us-east-2".into()),
            endpoint: Some("http://h:1".into()),
            ..options("images", "a")
        };
        let place = Place::of(&given, &environment).unwrap();
        assert_eq!(
            (&*place.region, &*place.url, place.port),
            ("us-east-2", "http://h:1/images/a", 1)
        );
    }

    #[test]
    fn names_that_no_url_can_have_are_refused() {
        for key in ["", ".", "a/../b", "./a", &"k".repeat(1025)] {
            assert!(check_key(key).is_err(), "{key}");
        }
        for bucket in ["", "..", "a/b", "a\nb", &"b".repeat(256)] {
            assert!(check_bucket(bucket).is_err(), "{bucket}");
        }
        assert!(check_key("a..b/.c//").is_ok() && check_bucket("Tenant:bucket_1").is_ok());
    }
}
