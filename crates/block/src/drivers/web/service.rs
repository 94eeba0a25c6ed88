//! What differs between kinds of web servers: how a client is authorized, and what a refusal says.

use std::time::SystemTime;

use reqwest::header::HeaderMap;
use reqwest::{StatusCode, Url};

use super::answer::Failure;

/// A kind of web server.
pub(in crate::drivers) trait Service: Send + Sync {
    /// Adds the headers that authorize a question. Called for each attempt, with its time.
    ///
    /// The question goes to the server that the options name.
    fn authorize(&self, url: &Url, headers: &mut HeaderMap, now: SystemTime);

    /// Whether questions follow redirects to other servers.
    fn redirects(&self) -> bool;

    /// Returns how many bytes of a refusal's body may say why.
    fn longest_refusal(&self) -> usize;

    /// Returns the failure with what the refusal says.
    fn explain(&self, failure: Failure, refusal: &Refusal<'_>) -> Failure;

    /// Returns the sentence that tells which options name the user.
    fn user(&self) -> &'static str;
}

/// An answer that is an error of the server's.
pub(in crate::drivers) struct Refusal<'a> {
    pub(in crate::drivers) status: StatusCode,
    pub(in crate::drivers) headers: &'a HeaderMap,
    /// The beginning of the body, at most [`longest_refusal`](Service::longest_refusal) bytes.
    pub(in crate::drivers) body: &'a [u8],
    /// The time that [`authorize`](Service::authorize) had.
    pub(in crate::drivers) asked_at: SystemTime,
}
