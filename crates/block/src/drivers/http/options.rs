//! Options of `http` and `https`.

use ::options::place::{Checked, Of, Text};
use ::options::shape::Member;
use ::options::table::{Context, Field, Row};
use ::options::{Object, OptionError};
use reqwest::Url;

use crate::driver::{DriverKind, OptionTable};
use crate::drivers::web::{OnWeb, WebOptions, is_of, more_members, read_more, server, shown};
use crate::options::Driver;

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
    /// The options of all images on web servers.
    pub web: WebOptions,
    /// `username`.
    pub username: Option<String>,
    /// `password-secret`: the `id` of the secret with the password.
    pub password_secret: Option<String>,
    /// `cookie`.
    pub cookie: Option<String>,
    /// `cookie-secret`: the `id` of the secret with the cookies.
    pub cookie_secret: Option<String>,
    /// `force-range`.
    pub force_range: bool,
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
    pub fn with(mut self, more: Object, at: &Context) -> Result<HttpOptions, OptionError> {
        let (fields, name) = (self.scheme.fields(), self.scheme.kind().name);
        read_more((fields, name, OF_URL), &mut self, more, at)?;
        finish(self)
    }

    /// Returns the options that [`with`](Self::with) takes.
    #[must_use]
    pub fn more_members() -> Vec<Member> {
        more_members(HTTPS_FIELDS, OF_URL)
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

/// The options that a URL has.
const OF_URL: &[&str] = &["url"];

fn start(scheme: Scheme) -> HttpOptions {
    HttpOptions {
        scheme,
        url: String::new(),
        host: String::new(),
        port: 0,
        web: WebOptions::default(),
        username: None,
        password_secret: None,
        cookie: None,
        cookie_secret: None,
        force_range: false,
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
    (options.host, options.port) = server(&url).ok_or_else(unreadable)?;
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

impl OnWeb for HttpOptions {
    fn web(&mut self) -> &mut WebOptions {
        &mut self.web
    }
}

macro_rules! fields {
    ($scheme:expr, $example:literal, $($more:expr)?) => {
        &[
            Row::required("url", "where the image is").at(&Checked {
                meta: $example,
                check: |url: &String| check_url($scheme, url),
                at: |node: &mut HttpOptions| &mut node.url,
            }),
            HttpOptions::READAHEAD,
            HttpOptions::TIMEOUT,
            Row::optional(
                "username",
                "no authentication",
                "user for the server, by basic authentication",
            )
            .at(&Text("<name>", |node: &mut HttpOptions| &mut node.username)),
            Row::optional(
                "password-secret",
                "no password",
                "the secret object with that user's password",
            )
            .at(&Text("<id>", |node: &mut HttpOptions| &mut node.password_secret)),
            HttpOptions::PROXY_USERNAME,
            HttpOptions::PROXY_PASSWORD_SECRET,
            Row::default(
                "force-range",
                "off",
                "without effect: a range is asked for at opening, whatever the server announces",
            )
            .at(&Of(|node: &mut HttpOptions| &mut node.force_range)),
            Row::optional(
                "cookie",
                "no cookies",
                "cookies for the server, as in the header of a request; cookie-secret keeps them out of sight",
            )
            .at(&Text("<cookies>", |node: &mut HttpOptions| &mut node.cookie)),
            Row::optional("cookie-secret", "no cookies", "the secret object with the cookies")
                .at(&Text("<id>", |node: &mut HttpOptions| &mut node.cookie_secret)),
            $($more,)?
            HttpOptions::RECONNECT_DELAY,
            HttpOptions::OPEN_TIMEOUT,
        ]
    };
}

static HTTP_FIELDS: &[Field<HttpOptions>] = fields!(Scheme::Http, "http://<host>/<path>",);

static HTTPS_FIELDS: &[Field<HttpOptions>] =
    fields!(Scheme::Https, "https://<host>/<path>", HttpOptions::SSLVERIFY);

#[cfg(test)]
mod tests {
    use super::*;

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
}
