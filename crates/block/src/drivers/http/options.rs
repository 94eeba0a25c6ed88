//! Options of `http` and `https`.

use ::options::place::{Checked, Of, Size, Text};
use ::options::shape::Member;
use ::options::table::{self, Context, Field, Kind, Need};
use ::options::{Object, OptionError};
use reqwest::Url;

use crate::driver::{DriverKind, OptionTable};
use crate::options::Driver;

/// Bytes that are read ahead of a sequential reader, if the options say nothing, as in QEMU.
const READAHEAD: u64 = 256 << 10;
/// The most, bytes: four times as much may be kept.
const MAX_READAHEAD: u64 = 64 << 20;
/// Seconds without a byte, if the options say nothing: QEMU's limit for a whole answer.
const TIMEOUT: u64 = 5;
/// QEMU's largest value.
const MAX_TIMEOUT: u64 = 10_000;
/// Seconds that requests wait for the server, if the options say nothing.
const RECONNECT_DELAY: u32 = 30;

pub(in crate::drivers) static HTTP: DriverKind = DriverKind {
    name: "http",
    help: "an image on a web server, for reading",
    example: "http,node-name=n,url=http://example.org/disk.img,read-only=on",
    options: &OptionTable { fields: HTTP_FIELDS, start: |_| start(Scheme::Http), build },
    create: None,
    amend: None,
    library: None,
};

pub(in crate::drivers) static HTTPS: DriverKind = DriverKind {
    name: "https",
    help: "the same, with TLS",
    example: "https,node-name=n,url=https://example.org/disk.img,read-only=on",
    options: &OptionTable { fields: HTTPS_FIELDS, start: |_| start(Scheme::Https), build },
    create: None,
    amend: None,
    library: None,
};

/// The driver of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// `http`.
    Http,
    /// `https`.
    Https,
}

impl Scheme {
    /// Returns the driver's line in the list.
    pub(super) fn kind(self) -> &'static DriverKind {
        match self {
            Scheme::Http => &HTTP,
            Scheme::Https => &HTTPS,
        }
    }

    pub(super) fn fields(self) -> &'static [Field<HttpOptions>] {
        match self {
            Scheme::Http => HTTP_FIELDS,
            Scheme::Https => HTTPS_FIELDS,
        }
    }
}

/// Options of `http` and `https`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpOptions {
    /// The driver.
    pub scheme: Scheme,
    /// `url`.
    pub url: String,
    /// The host in `url`.
    pub host: String,
    /// The port in `url`, or the usual one.
    pub port: u16,
    /// `readahead`: bytes that are read ahead of a sequential reader, a multiple of 512. 0: none.
    pub readahead: u64,
    /// `timeout`: seconds after which an answer is given up of which no byte comes. 0: none.
    pub timeout: u64,
    /// `username`.
    pub username: Option<String>,
    /// `password-secret`: the `id` of the secret with the password.
    pub password_secret: Option<String>,
    /// `proxy-username`.
    pub proxy_username: Option<String>,
    /// `proxy-password-secret`: the `id` of the secret with the password for the proxy.
    pub proxy_password_secret: Option<String>,
    /// `cookie`.
    pub cookie: Option<String>,
    /// `cookie-secret`: the `id` of the secret with the cookies.
    pub cookie_secret: Option<String>,
    /// `sslverify`: whether the server's certificate is checked.
    pub sslverify: bool,
    /// `force-range`.
    pub force_range: bool,
    /// `reconnect-delay`, seconds: how long requests wait for a server that does not answer. 0: they fail at once.
    pub reconnect_delay: u32,
    /// `open-timeout`, seconds: how long a server that does not answer is asked again when the node is opened. 0: once.
    pub open_timeout: u32,
}

impl HttpOptions {
    /// Returns the options of an image, with the defaults of all but its URL.
    ///
    /// # Errors
    ///
    /// The URL is none of an `http` or `https` node.
    pub fn of_url(url: &str) -> Result<HttpOptions, OptionError> {
        let scheme = if is_of(url, "https://") { Scheme::Https } else { Scheme::Http };
        check_url(scheme, url)?;
        finish(HttpOptions { url: url.to_owned(), ..start(scheme) })
    }

    /// Takes more options than the URL.
    ///
    /// # Errors
    ///
    /// An option is unknown, wrong or contradicts another one.
    pub fn with(mut self, mut more: Object, at: &Context) -> Result<HttpOptions, OptionError> {
        let fields = || self.scheme.fields().iter().filter(|field| !is_of_url(field.name));
        let known: Vec<_> = fields().map(|field| field.name).collect();
        for field in fields() {
            if let Some(value) = table::take(&mut more, field.name) {
                field.set(&mut self, value, at)?;
            }
        }
        let owner = format!("driver '{}'", self.scheme.kind().name);
        table::refuse_rest(&more, at, &owner, known.into_iter())?;
        finish(self)
    }

    /// Returns the options that [`with`](Self::with) takes.
    #[must_use]
    pub fn more_members() -> Vec<Member> {
        let mut members = table::members(HTTPS_FIELDS);
        members.retain(|member| !is_of_url(member.name));
        members
    }

    /// Returns the URL for a log: without a query, which may be a signature.
    #[must_use]
    pub fn shown(&self) -> String {
        Url::parse(&self.url).map_or_else(|_| "...".to_owned(), |url| shown(&url))
    }

    /// Returns the last part of the path. `None`: there is none.
    #[must_use]
    pub fn file_name(&self) -> Option<String> {
        let url = Url::parse(&self.url).ok()?;
        url.path_segments()?.next_back().filter(|name| !name.is_empty()).map(str::to_owned)
    }

    /// Returns the options as a driver's.
    #[must_use]
    pub fn driver(self) -> Driver {
        self.into()
    }
}

/// Returns whether a text is the URL of an image on a web server.
#[must_use]
pub fn is_url(text: &str) -> bool {
    is_of(text, "http://") || is_of(text, "https://")
}

/// Returns whether a URL says what the option says.
fn is_of_url(option: &str) -> bool {
    option == "url"
}

fn is_of(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

/// Returns a URL for a log or an error: without user, password, query and fragment, which may be secret.
pub(super) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    let _ = (url.set_username(""), url.set_password(None));
    if url.query().is_some() {
        url.set_query(Some("..."));
    }
    url.set_fragment(None);
    url.into()
}

fn start(scheme: Scheme) -> HttpOptions {
    HttpOptions {
        scheme,
        url: String::new(),
        host: String::new(),
        port: 0,
        readahead: READAHEAD,
        timeout: TIMEOUT,
        username: None,
        password_secret: None,
        proxy_username: None,
        proxy_password_secret: None,
        cookie: None,
        cookie_secret: None,
        sslverify: true,
        force_range: false,
        reconnect_delay: RECONNECT_DELAY,
        open_timeout: 0,
    }
}

fn build(options: HttpOptions) -> Result<Driver, OptionError> {
    finish(options).map(Driver::from)
}

fn finish(mut options: HttpOptions) -> Result<HttpOptions, OptionError> {
    if options.cookie.is_some() && options.cookie_secret.is_some() {
        return Err(OptionError::new("curl driver cannot handle both cookie and cookie secret"));
    }
    let unreadable = || OptionError::new("Parameter 'url' names no host");
    let url = Url::parse(&options.url).map_err(|_| unreadable())?;
    // An address of IPv6 has brackets in a URL.
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() {
        return Err(unreadable());
    }
    options.host = host.to_owned();
    options.port = url.port_or_known_default().unwrap_or(0);
    Ok(options)
}

/// Checks what the driver can do with a URL. The first message is QEMU's.
fn check_url(scheme: Scheme, url: &str) -> Result<(), OptionError> {
    let name = scheme.kind().name;
    if !is_of(url, &format!("{name}://")) {
        // The text may have a password or a signature in it.
        let shown = match Url::parse(url) {
            Ok(url) => shown(&url),
            Err(_) if url.contains(['@', '?']) => "...".to_owned(),
            Err(_) => url.to_owned(),
        };
        return Err(OptionError::new(format!(
            "{name} curl driver cannot handle the URL '{shown}' (does not start with '{name}://')"
        )));
    }
    let parsed = Url::parse(url)
        .map_err(|error| OptionError::new(format!("Parameter 'url' is not a URL: {error}")))?;
    if !parsed.username().is_empty() || parsed.password().is_some() {
        let why = "Parameter 'url' has a user in it, which logs and queries would show";
        return Err(OptionError::new(why).hint(
            "Name the user by username, and a secret object with the password by password-secret.",
        ));
    }
    Ok(())
}

type Place = HttpOptions;

macro_rules! fields {
    ($scheme:expr, $example:literal, $($more:expr)?) => {
        &[
            Field {
                name: "url",
                kind: Kind::At(&Checked {
                    meta: $example,
                    check: |url: &String| check_url($scheme, url),
                    at: |node: &mut Place| &mut node.url,
                }),
                need: Need::Required,
                help: "where the image is",
            },
            Field {
                name: "readahead",
                kind: Kind::At(&Size(|node: &mut Place| &mut node.readahead)),
                need: Need::Default("262144"),
                help: "bytes that are read ahead of a sequential reader, a multiple of 512; 0 for none",
            },
            Field {
                name: "timeout",
                kind: Kind::At(&Checked {
                    meta: "",
                    check: |timeout: &u64| match *timeout > MAX_TIMEOUT {
                        true => Err(OptionError::new("timeout parameter is too large or negative")),
                        false => Ok(()),
                    },
                    at: |node: &mut Place| &mut node.timeout,
                }),
                need: Need::Default("5"),
                help: "seconds after which an answer is given up of which no byte comes; 0 for no limit",
            },
            Field {
                name: "username",
                kind: Kind::At(&Text("<name>", |node: &mut Place| &mut node.username)),
                need: Need::Optional("no authentication"),
                help: "user for the server, by basic authentication",
            },
            Field {
                name: "password-secret",
                kind: Kind::At(&Text("<id>", |node: &mut Place| &mut node.password_secret)),
                need: Need::Optional("no password"),
                help: "the secret object with that user's password",
            },
            Field {
                name: "proxy-username",
                kind: Kind::At(&Text("<name>", |node: &mut Place| &mut node.proxy_username)),
                need: Need::Optional("no authentication"),
                help: "user for the proxy that the environment names, by basic authentication",
            },
            Field {
                name: "proxy-password-secret",
                kind: Kind::At(&Text("<id>", |node: &mut Place| &mut node.proxy_password_secret)),
                need: Need::Optional("no password"),
                help: "the secret object with that user's password",
            },
            Field {
                name: "force-range",
                kind: Kind::At(&Of(|node: &mut Place| &mut node.force_range)),
                need: Need::Default("off"),
                help: "without effect: a range is asked for at opening, whatever the server announces",
            },
            Field {
                name: "cookie",
                kind: Kind::At(&Text("<cookies>", |node: &mut Place| &mut node.cookie)),
                need: Need::Optional("no cookies"),
                help: "cookies for the server, as in the header of a request; cookie-secret keeps them out of sight",
            },
            Field {
                name: "cookie-secret",
                kind: Kind::At(&Text("<id>", |node: &mut Place| &mut node.cookie_secret)),
                need: Need::Optional("no cookies"),
                help: "the secret object with the cookies",
            },
            $($more,)?
            Field {
                name: "reconnect-delay",
                kind: Kind::At(&Of(|node: &mut Place| &mut node.reconnect_delay)),
                need: Need::Default("30"),
                help: "seconds that requests wait for a server that does not answer; then, and with 0 at once, \
                       they fail until it does",
            },
            Field {
                name: "open-timeout",
                kind: Kind::At(&Of(|node: &mut Place| &mut node.open_timeout)),
                need: Need::Default("0"),
                help: "seconds that opening waits for a server that does not answer; 0: it is asked once",
            },
        ]
    };
}

static HTTP_FIELDS: &[Field<Place>] = fields!(Scheme::Http, "http://<host>/<path>",);

static HTTPS_FIELDS: &[Field<Place>] = fields!(
    Scheme::Https,
    "https://<host>/<path>",
    Field {
        name: "sslverify",
        kind: Kind::At(&Of(|node: &mut Place| &mut node.sslverify)),
        need: Need::Default("on"),
        help: "whether the server's certificate is checked against the system's authorities",
    }
);

/// Checks `readahead`; the first message is QEMU's.
pub(super) fn check_readahead(readahead: u64) -> Result<(), String> {
    match readahead {
        _ if !readahead.is_multiple_of(512) => {
            Err(format!("HTTP_READAHEAD_SIZE {readahead} is not a multiple of 512"))
        }
        _ if readahead > MAX_READAHEAD => {
            Err(format!("readahead of {readahead} bytes is more than {MAX_READAHEAD}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_told_from_paths() {
        assert!(is_url("http://a/b") && is_url("HTTPS://a/b"));
        assert!(!is_url("http:/a") && !is_url("/http://a") && !is_url("ftp://a/b") && !is_url("é"));
    }

    #[test]
    fn a_url_gives_host_and_port_and_no_user() {
        let options = HttpOptions::of_url("https://[::1]:8443/a.img?sig=s").unwrap();
        assert_eq!((options.scheme, &*options.host, options.port), (Scheme::Https, "::1", 8443));
        let options = HttpOptions::of_url("http://example.org/a.img").unwrap();
        assert_eq!(
            (options.scheme, &*options.host, options.port),
            (Scheme::Http, "example.org", 80)
        );
        for url in ["http://u@h/a", "http://u:p4ss@h/a", "https:///", "http://h:99999/a", "a.img"] {
            let error = HttpOptions::of_url(url).unwrap_err().to_string();
            assert!(!error.contains("p4ss"), "{url}: {error}");
        }
    }

    #[test]
    fn what_is_shown_of_a_url_has_no_signature() {
        let url = Url::parse("https://u:p@h:1/a?X-Amz-Signature=5ec3e7#f").unwrap();
        assert_eq!(shown(&url), "https://h:1/a?...");
    }
}
