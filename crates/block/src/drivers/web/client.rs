//! The HTTP client of a node: TLS, proxies, redirects and credentials.

use std::env;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::HeaderValue;
use reqwest::redirect::{Action, Attempt, Policy};
use reqwest::{Client, NoProxy, Proxy, Url};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use super::options::{WebOptions, shown};
use super::service::Service;
use crate::connections::Credentials;
use crate::error::OpenError;

/// The most redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// Bytes that a server may send ahead of an HTTP/2 stream's reader, and of a connection's readers.
const WINDOW: (u32, u32) = (1 << 20, 16 << 20);
/// Time after which a connection without an answer counts as broken.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// What it takes to ask a server for an image.
pub(crate) struct Access {
    pub(super) client: Client,
    pub(super) url: Url,
    pub(super) service: Box<dyn Service>,
    /// Longest time without a byte.
    pub(super) patience: Duration,
    /// How long a server that does not answer is asked again at opening.
    pub(super) open_timeout: Duration,
    /// The variable that names the proxy, if one does, and the proxy without a password.
    pub(super) proxy: Option<(&'static str, String)>,
}

impl Access {
    /// Prepares a client. Reads the system's certificate authorities from the disk.
    pub(in crate::drivers) fn new(
        url: Url,
        service: Box<dyn Service>,
        options: &WebOptions,
        credentials: &Credentials,
    ) -> Result<Access, OpenError> {
        let scheme = Scheme::of(&url);
        let WebOptions { timeout, proxy_username, proxy_password_secret, .. } = options;
        let patience = match timeout {
            0 => Duration::MAX,
            seconds => Duration::from_secs(*seconds),
        };
        let redirects = match service.redirects() {
            true => Policy::custom(follow),
            false => Policy::none(),
        };
        let mut client = Client::builder()
            .user_agent(concat!("ringmill/", env!("CARGO_PKG_VERSION")))
            .redirect(redirects)
            .referer(false)
            .tcp_nodelay(true)
            .http2_initial_stream_window_size(WINDOW.0)
            .http2_initial_connection_window_size(WINDOW.1)
            .tls_backend_preconfigured(tls(scheme, options.sslverify)?);
        if *timeout > 0 {
            client = client.connect_timeout(patience).http2_keep_alive_interval(KEEP_ALIVE);
        }
        if proxy_username.is_some() || proxy_password_secret.is_some() {
            let user = proxy_username.as_deref().unwrap_or_default();
            let password = proxy_password_secret.as_deref().map(|id| credentials.secret(id));
            let password = password.transpose()?;
            let password = password.as_deref().map_or(&[][..], |text| text);
            let password = std::str::from_utf8(password)
                .map_err(|_| OpenError::new("the secret of proxy-password-secret is not text"))?;
            for proxy in proxies(scheme)? {
                client =
                    client.proxy(proxy.basic_auth(user, password).no_proxy(NoProxy::from_env()));
            }
        }
        let client = client.build().map_err(|error| {
            OpenError::new(format!("HTTP client: {}", super::source::told(error)))
        })?;
        let open_timeout = Duration::from_secs(options.open_timeout.into());
        let proxy = proxy_of(scheme).map(|(name, proxy)| (name, proxy_shown(&proxy)));
        Ok(Access { client, url, service, patience, open_timeout, proxy })
    }
}

/// How a server is reached, which decides the proxy and whether there have to be certificate authorities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheme {
    Http,
    Https,
}

impl Scheme {
    fn of(url: &Url) -> Scheme {
        if url.scheme() == "https" { Scheme::Https } else { Scheme::Http }
    }
}

/// Returns the value of a header that no log shows.
pub(in crate::drivers) fn hidden(value: &[u8], option: &str) -> Result<HeaderValue, OpenError> {
    let why = || {
        OpenError::new(format!("{option}: a header cannot have such bytes, such as a line's end"))
    };
    let mut value = HeaderValue::from_bytes(value).map_err(|_| why())?;
    value.set_sensitive(true);
    Ok(value)
}

/// Follows redirects, except from TLS to none.
fn follow(attempt: Attempt<'_>) -> Action {
    let was_secure = attempt.previous().iter().any(|url| url.scheme() == "https");
    match attempt.url().scheme() {
        "https" | "http" if attempt.previous().len() > MAX_REDIRECTS => {
            attempt.error("too many redirects")
        }
        "https" => attempt.follow(),
        "http" if !was_secure => attempt.follow(),
        "http" => attempt.error("the server redirects from https to http"),
        _ => attempt.error("the server redirects to something else than http and https"),
    }
}

/// Variables of the environment that name proxies, as `reqwest` reads them.
fn proxy_variables(scheme: Scheme) -> &'static [&'static str] {
    match scheme {
        Scheme::Http => &["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"],
        Scheme::Https => &["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"],
    }
}

/// Returns the variable that names the proxy, and its value.
fn proxy_of(scheme: Scheme) -> Option<(&'static str, String)> {
    let named = |name: &'static str| Some((name, env::var(name).ok()?));
    let values = proxy_variables(scheme).iter().copied().filter_map(named);
    values.into_iter().find(|(_, value)| !value.is_empty())
}

/// Returns the URL of a proxy, which may have no scheme.
fn proxy_url(proxy: &str) -> Option<Url> {
    let url = Url::parse(proxy).ok().filter(Url::has_host);
    url.or_else(|| Url::parse(&format!("http://{proxy}")).ok())
}

fn proxy_shown(proxy: &str) -> String {
    proxy_url(proxy).map_or_else(|| "...".to_owned(), |url| shown(&url))
}

/// Returns the proxies of the environment, for a client that authenticates itself. Redirects may go from http to https.
fn proxies(scheme: Scheme) -> Result<Vec<Proxy>, OpenError> {
    let of = |scheme, make: fn(String) -> reqwest::Result<Proxy>| {
        let made = proxy_of(scheme).map(|(_, proxy)| make(proxy)).transpose();
        made.map_err(|_| OpenError::new("the environment's proxy is not a URL"))
    };
    let found: Vec<_> = [of(Scheme::Http, Proxy::http)?, of(Scheme::Https, Proxy::https)?]
        .into_iter()
        .flatten()
        .collect();
    if proxy_of(scheme).is_none() {
        log::warn!("proxy-username: the environment names no proxy, so there is none");
    }
    Ok(found)
}

/// Returns the ports of the proxies that the environment names.
pub(super) fn proxy_ports() -> Vec<u16> {
    let found = [Scheme::Http, Scheme::Https].into_iter().filter_map(proxy_of);
    found.filter_map(|(_, proxy)| proxy_url(&proxy)?.port_or_known_default()).collect()
}

fn tls(scheme: Scheme, verifies: bool) -> Result<ClientConfig, OpenError> {
    let failed = |error: &dyn std::fmt::Display| OpenError::new(format!("TLS: {error}"));
    let provider = Arc::new(ring::default_provider());
    let verifier: Arc<dyn ServerCertVerifier> = match verifies {
        // A redirect may lead to https.
        true => {
            let roots = Arc::new(roots(scheme)?);
            match roots.is_empty() {
                true => Arc::new(Trust { provider: provider.clone(), all: false }),
                false => WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
                    .build()
                    .map_err(|error| failed(&error))?,
            }
        }
        false => Arc::new(Trust { provider: provider.clone(), all: true }),
    };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(&error))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// Returns the system's certificate authorities, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
fn roots(scheme: Scheme) -> Result<RootCertStore, OpenError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() && scheme == Scheme::Https {
        let why = found.errors.first().map_or_else(String::new, |error| format!(": {error}"));
        return Err(OpenError::new(format!("TLS: no certificate authorities were found{why}"))
            .with_hint("Install the package ca-certificates, or name a file by SSL_CERT_FILE"));
    }
    Ok(roots)
}

/// Trusts all servers, or none.
#[derive(Debug)]
struct Trust {
    provider: Arc<CryptoProvider>,
    all: bool,
}

impl ServerCertVerifier for Trust {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.all {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(rustls::CertificateError::UnknownIssuer.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
