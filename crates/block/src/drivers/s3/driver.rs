//! What `s3` is, of images on web servers.

use ::options::{Object, Value, table};
use reqwest::Url;

use super::keys;
use super::options::{AddressingStyle, FIELDS, S3, S3Options};
use super::place::environment;
use super::store::Store;
use crate::connections::Credentials;
use crate::driver::DriverKind;
use crate::drivers::web::{Access, WebImage, WebOptions};
use crate::error::OpenError;

impl WebImage for S3Options {
    const NO_WRITES: &str = "s3 driver does not support writes";
    /// Redirects are not followed.
    const REDIRECTS: &[u16] = &[];

    fn line(&self) -> &'static DriverKind {
        &S3
    }

    fn written(&self) -> Object {
        table::write(FIELDS, &mut self.clone())
    }

    fn shared(&self) -> &WebOptions {
        &self.web
    }

    fn server(&self) -> (&str, u16) {
        (&self.place.host, self.place.port)
    }

    fn secrets(&self) -> Vec<&str> {
        let secrets = [&self.secret_key_secret, &self.session_token_secret];
        secrets.into_iter().flatten().map(|id| &**id).collect()
    }

    fn named(&self) -> (Option<String>, Vec<(&'static str, Value)>) {
        let style = self.addressing_style.map(|style| match style {
            AddressingStyle::Path => "path",
            AddressingStyle::VirtualHosted => "virtual-hosted",
        });
        let texts = [
            ("bucket", Some(&*self.bucket)),
            ("key", Some(&*self.key)),
            ("region", self.region.as_deref()),
            ("endpoint", self.endpoint.as_deref()),
            ("addressing-style", style),
            ("access-key", self.access_key.as_deref()),
            ("secret-key-secret", self.secret_key_secret.as_deref()),
            ("session-token-secret", self.session_token_secret.as_deref()),
        ];
        let given = texts.into_iter().filter_map(|(name, text)| Some((name, text?.into())));
        let anonymous = self.anonymous.then(|| ("anonymous", true.into()));
        let options: Vec<_> = given.chain(anonymous).collect();
        ((options.len() == 2).then(|| self.url()), options)
    }

    fn access(&self, credentials: &Credentials) -> Result<Access, OpenError> {
        let url = Url::parse(&self.place.url)
            .map_err(|error| OpenError::new(format!("endpoint: {error}")))?;
        let store = Store {
            keys: keys::find(self, credentials, &environment)?,
            region: self.place.region.clone(),
            bucket: self.bucket.clone(),
        };
        Access::new(url, Box::new(store), &self.web, credentials)
    }
}
