//! What `http` and `https` are, of images on web servers.

use ::options::{Object, Value, table};
use crypto::Secret;
use reqwest::Url;
use reqwest::header::{AUTHORIZATION, COOKIE, HeaderMap};
use std::time::SystemTime;

use super::options::HttpOptions;
use crate::connections::Credentials;
use crate::driver::DriverKind;
use crate::drivers::web::{Access, Failure, Refusal, Service, WebImage, WebOptions, hidden};
use crate::error::OpenError;

impl WebImage for HttpOptions {
    /// QEMU's words.
    const NO_WRITES: &str = "curl driver does not support writes";
    /// The usual ports.
    const REDIRECTS: &[u16] = &[80, 443];

    fn line(&self) -> &'static DriverKind {
        self.scheme.kind()
    }

    fn written(&self) -> Object {
        table::write(self.scheme.fields(), &mut self.clone())
    }

    fn shared(&self) -> &WebOptions {
        &self.web
    }

    fn server(&self) -> (&str, u16) {
        (&self.host, self.port)
    }

    fn secrets(&self) -> Vec<&str> {
        [&self.password_secret, &self.cookie_secret].into_iter().flatten().map(|id| &**id).collect()
    }

    /// Without `cookie`, which is secret.
    fn named(&self) -> (Option<String>, Vec<(&'static str, Value)>) {
        let texts = [
            ("username", &self.username),
            ("password-secret", &self.password_secret),
            ("cookie-secret", &self.cookie_secret),
        ];
        let given = texts.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)));
        let mut options = vec![("url", Value::from(self.url.as_str()))];
        options.extend(given.map(|(name, value)| (name, value.into())));
        let name = (options.len() == 1 && self.cookie.is_none()).then(|| self.url.clone());
        (name, options)
    }

    fn access(&self, credentials: &Credentials) -> Result<Access, OpenError> {
        let url = Url::parse(&self.url).map_err(|error| OpenError::new(format!("url: {error}")))?;
        let secret =
            |id: &Option<String>| id.as_deref().map(|id| credentials.secret(id)).transpose();
        let (password, cookies) = (secret(&self.password_secret)?, secret(&self.cookie_secret)?);
        let mut headers = HeaderMap::new();
        if let Some(user) = &self.username {
            let pair = [user.as_bytes(), b":", password.as_deref().map_or(&[][..], |text| text)];
            let pair = Secret::new(pair.concat());
            let basic = Secret::new(format!("Basic {}", crypto::secret::to_base64(&pair)).into());
            headers.insert(AUTHORIZATION, hidden(&basic, "password-secret")?);
        }
        let cookies = cookies.as_deref().map(|cookies| cookies.as_slice());
        if let Some(cookies) = cookies.or(self.cookie.as_deref().map(str::as_bytes)) {
            headers.insert(COOKIE, hidden(cookies, "cookie")?);
        }
        Access::new(url, Box::new(WebServer(headers)), &self.web, credentials)
    }
}

/// A web server, with `Authorization` and `Cookie` for it.
struct WebServer(HeaderMap);

impl Service for WebServer {
    fn authorize(&self, _url: &Url, headers: &mut HeaderMap, _now: SystemTime) {
        headers.extend(self.0.clone());
    }

    fn redirects(&self) -> bool {
        true
    }

    /// A body is a page for people.
    fn longest_refusal(&self) -> usize {
        0
    }

    fn explain(&self, failure: Failure, _refusal: &Refusal<'_>) -> Failure {
        failure
    }

    fn user(&self) -> &'static str {
        "username and password-secret name the user"
    }
}
