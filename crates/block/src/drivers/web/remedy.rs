//! What a user can do about an image that cannot be opened.

use super::answer::Failure;
use super::client::Access;

/// What helps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Remedy<'a> {
    /// The certificate is of an authority that is not known.
    Authority,
    /// The certificate is wrong in another way.
    Certificate,
    /// The sandbox refuses the connection.
    Sandbox,
    /// The proxy, which a variable of the environment names, wants to know the user.
    ProxyUser,
    /// The server wants to know the user, which these options name.
    User(&'a str),
    /// The variable of the environment, and the proxy that it names, which may be wrong.
    Proxy(&'a str, &'a str),
}

impl<'a> Remedy<'a> {
    /// Returns what helps. `None`: the failure says enough.
    pub(super) fn of(access: &'a Access, failure: &Failure) -> Option<Remedy<'a>> {
        let proxy = access.proxy.as_ref().map(|(name, proxy)| (name, proxy.as_str()));
        let why = failure.why();
        match failure {
            Failure::Broken(_) if why.contains("UnknownIssuer") => Some(Remedy::Authority),
            Failure::Broken(_) if why.contains("invalid peer certificate") => {
                Some(Remedy::Certificate)
            }
            Failure::Broken(_) if why.contains("Permission denied") => Some(Remedy::Sandbox),
            // For TLS, the proxy's answer is an error of the connection.
            Failure::Broken(_) if why.contains("proxy authorization required") => {
                Some(Remedy::ProxyUser)
            }
            Failure::Broken(_) | Failure::Passing(..) => {
                proxy.map(|(name, proxy)| Remedy::Proxy(name, proxy))
            }
            Failure::Lasting(_) if why.ends_with(" 407") => Some(Remedy::ProxyUser),
            Failure::Lasting(_) if why.ends_with(" 401") => {
                Some(Remedy::User(access.service.user()))
            }
            Failure::Lasting(_) | Failure::Changed(_) => None,
        }
    }

    /// Returns whether another attempt fails, too, unless the user does it.
    pub(super) fn is_needed(self) -> bool {
        match self {
            Remedy::Authority
            | Remedy::Certificate
            | Remedy::Sandbox
            | Remedy::ProxyUser
            | Remedy::User(_) => true,
            Remedy::Proxy(..) => false,
        }
    }

    /// Returns it in words.
    pub(super) fn sentence(self) -> String {
        match self {
            Remedy::Authority => "SSL_CERT_FILE in the daemon's environment names a file with the certificates of \
                                  the authorities to trust, and replaces the system's; sslverify=off trusts all servers"
                .to_owned(),
            Remedy::Certificate => "sslverify=off trusts all servers".to_owned(),
            Remedy::Sandbox => "The sandbox of a daemon without a monitor lets redirects lead to ports 80 and 443 only"
                .to_owned(),
            Remedy::ProxyUser => "proxy-username and proxy-password-secret name the user for the proxy".to_owned(),
            Remedy::User(options) => options.to_owned(),
            Remedy::Proxy(name, proxy) => format!(
                "{name} in the daemon's environment names the proxy '{proxy}'; no_proxy lists hosts that need none"
            ),
        }
    }
}
