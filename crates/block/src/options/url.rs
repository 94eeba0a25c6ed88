//! Images that a URL names, of all drivers that have URLs.

use ::options::shape::Member;
use ::options::table::Context;
use ::options::{Object, OptionError};

use crate::connections::Credentials;
use crate::drivers::web::{Access, WebImage, is_of};
use crate::error::OpenError;
use crate::options::{Driver, HttpOptions, S3Options};

/// The options of an image that a URL names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UrlOptions {
    /// `http://…`, `https://…`.
    Http(HttpOptions),
    /// `s3://…`.
    S3(S3Options),
}

impl UrlOptions {
    /// Returns the options of an image, with the defaults of all but what its URL says.
    ///
    /// # Errors
    ///
    /// No driver has such a URL.
    pub fn of_url(url: &str) -> Result<UrlOptions, OptionError> {
        match is_s3(url) {
            true => S3Options::of_url(url).map(UrlOptions::S3),
            false => HttpOptions::of_url(url).map(UrlOptions::Http),
        }
    }

    /// Takes more options than the URL.
    ///
    /// # Errors
    ///
    /// An option is unknown, wrong or contradicts another one.
    pub fn with(self, more: Object, at: &Context) -> Result<UrlOptions, OptionError> {
        match self {
            UrlOptions::Http(http) => http.with(more, at).map(UrlOptions::Http),
            UrlOptions::S3(s3) => s3.with(more, at).map(UrlOptions::S3),
        }
    }

    /// Returns the options that [`with`](Self::with) takes, of one driver or another.
    #[must_use]
    pub fn more_members() -> Vec<Member> {
        let mut members = HttpOptions::more_members();
        let of_s3 = S3Options::more_members().into_iter();
        let new = of_s3.filter(|new| members.iter().all(|member| member.name != new.name));
        let new: Vec<_> = new.collect();
        members.extend(new);
        members
    }

    /// Returns the URL for a log: without a query, which may be a signature.
    #[must_use]
    pub fn shown(&self) -> String {
        match self {
            UrlOptions::Http(http) => http.shown(),
            UrlOptions::S3(s3) => s3.url(),
        }
    }

    /// Returns the last part of the path. `None`: there is none.
    #[must_use]
    pub fn file_name(&self) -> Option<String> {
        match self {
            UrlOptions::Http(http) => http.file_name(),
            UrlOptions::S3(s3) => s3.file_name(),
        }
    }

    /// Returns the options as a driver's.
    #[must_use]
    pub fn driver(self) -> Driver {
        match self {
            UrlOptions::Http(http) => http.into(),
            UrlOptions::S3(s3) => s3.into(),
        }
    }

    pub(crate) fn access(&self, credentials: &Credentials) -> Result<Access, OpenError> {
        match self {
            UrlOptions::Http(http) => http.access(credentials),
            UrlOptions::S3(s3) => s3.access(credentials),
        }
    }
}

/// Returns whether a text is the URL of an image on a web server or in an object store.
#[must_use]
pub fn is_url(text: &str) -> bool {
    is_of(text, "http://") || is_of(text, "https://") || is_s3(text)
}

fn is_s3(text: &str) -> bool {
    is_of(text, "s3://")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_told_from_paths() {
        assert!(is_url("http://a/b") && is_url("HTTPS://a/b") && is_url("s3://a/b"));
        assert!(!is_url("http:/a") && !is_url("/http://a") && !is_url("ftp://a/b") && !is_url("é"));
    }
}
