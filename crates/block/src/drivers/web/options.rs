//! Options of all drivers of images on web servers.

use ::options::place::{Checked, Of, Size, Text};
use ::options::shape::Member;
use ::options::table::{self, Context, Field, Row};
use ::options::{Object, OptionError};
use reqwest::Url;

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

/// How a web server is asked for an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebOptions {
    /// `readahead`: bytes that are read ahead of a sequential reader at first, a multiple of 512. 0: none.
    pub readahead: u64,
    /// `timeout`: seconds after which an answer is given up of which no byte comes. 0: none.
    pub timeout: u64,
    /// `proxy-username`.
    pub proxy_username: Option<String>,
    /// `proxy-password-secret`: the `id` of the secret with the password for the proxy.
    pub proxy_password_secret: Option<String>,
    /// `sslverify`: whether the server's certificate is checked.
    pub sslverify: bool,
    /// `reconnect-delay`, seconds: how long requests wait for a server that does not answer. 0: they fail at once.
    pub reconnect_delay: u32,
    /// `open-timeout`, seconds: how long a server that does not answer is asked again when the node is opened. 0: once.
    pub open_timeout: u32,
}

impl Default for WebOptions {
    fn default() -> WebOptions {
        WebOptions {
            readahead: READAHEAD,
            timeout: TIMEOUT,
            proxy_username: None,
            proxy_password_secret: None,
            sslverify: true,
            reconnect_delay: RECONNECT_DELAY,
            open_timeout: 0,
        }
    }
}

/// Options with those of all images on web servers among them.
pub(in crate::drivers) trait OnWeb: Sized + 'static {
    /// Returns where those options go.
    fn web(&mut self) -> &mut WebOptions;

    const READAHEAD: Field<Self> = Row::default(
        "readahead",
        "262144",
        "bytes that are read ahead of a sequential reader at first, a multiple of 512; more, up to 8 MiB, if the server is \
         far away; 0 for none",
    )
    .at(&Size(|image: &mut Self| &mut image.web().readahead));

    const TIMEOUT: Field<Self> = Row::default(
        "timeout",
        "5",
        "seconds after which an answer is given up of which no byte comes; 0 for no limit",
    )
    .at(&Checked {
        meta: "",
        check: |timeout: &u64| match *timeout > MAX_TIMEOUT {
            true => Err(OptionError::new("timeout parameter is too large or negative")),
            false => Ok(()),
        },
        at: |image: &mut Self| &mut image.web().timeout,
    });

    const PROXY_USERNAME: Field<Self> = Row::optional(
        "proxy-username",
        "no authentication",
        "user for the proxy that the environment names, by basic authentication",
    )
    .at(&Text("<name>", |image: &mut Self| &mut image.web().proxy_username));

    const PROXY_PASSWORD_SECRET: Field<Self> = Row::optional(
        "proxy-password-secret",
        "no password",
        "the secret object with that user's password",
    )
    .at(&Text("<id>", |image: &mut Self| &mut image.web().proxy_password_secret));

    const SSLVERIFY: Field<Self> = Row::default(
        "sslverify",
        "on",
        "whether the server's certificate is checked against the system's authorities",
    )
    .at(&Of(|image: &mut Self| &mut image.web().sslverify));

    const RECONNECT_DELAY: Field<Self> = Row::default(
        "reconnect-delay",
        "30",
        "seconds that requests wait for a server that does not answer; then, and with 0 at once, \
         they fail until it does",
    )
    .at(&Of(|image: &mut Self| &mut image.web().reconnect_delay));

    const OPEN_TIMEOUT: Field<Self> = Row::default(
        "open-timeout",
        "0",
        "seconds that opening waits for a server that does not answer; 0: it is asked once",
    )
    .at(&Of(|image: &mut Self| &mut image.web().open_timeout));
}

/// Reads options that a URL leaves open. `table`: the driver's, its name, and the options that the URL has.
pub(in crate::drivers) fn read_more<T>(
    (fields, name, of_url): (&'static [Field<T>], &str, &[&str]),
    into: &mut T,
    mut more: Object,
    at: &Context,
) -> Result<(), OptionError> {
    let fields = || fields.iter().filter(|field| !of_url.contains(&field.name));
    for field in fields() {
        if let Some(value) = table::take(&mut more, field.name) {
            field.set(into, value, at)?;
        }
    }
    let known = fields().map(|field| field.name);
    table::refuse_rest(&more, at, &format!("driver '{name}'"), known)
}

/// Returns the options that [`read_more`] takes.
pub(in crate::drivers) fn more_members<T>(
    fields: &'static [Field<T>],
    of_url: &[&str],
) -> Vec<Member> {
    let mut members = table::members(fields);
    members.retain(|member| !of_url.contains(&member.name));
    members
}

/// Returns whether a text begins so, in upper or lower case.
pub(crate) fn is_of(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

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

/// Returns a URL for a log or an error: without user, password, query and fragment, which may be secret.
pub(in crate::drivers) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    let _ = (url.set_username(""), url.set_password(None));
    if url.query().is_some() {
        url.set_query(Some("..."));
    }
    url.set_fragment(None);
    url.into()
}

/// Returns the host of a URL, without the brackets of an IPv6 address, and its port.
pub(in crate::drivers) fn server(url: &Url) -> Option<(String, u16)> {
    let host = url.host_str()?.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| (host.to_owned(), url.port_or_known_default().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_of_a_url_has_no_signature() {
        let url = Url::parse("https://u:p@h:1/a?X-Amz-Signature=5ec3e7#f").unwrap();
        assert_eq!(shown(&url), "https://h:1/a?...");
    }
}
