//! The key that signs: of the options, the environment or a profile.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use crypto::Secret;

use super::options::S3Options;
use crate::connections::Credentials;
use crate::error::OpenError;

/// The longest file of profiles, bytes.
const MAX_FILE: u64 = 1 << 20;

/// A key that signs.
pub(super) struct Keys {
    /// The public name of the key.
    pub(super) access_key: String,
    pub(super) secret_key: Secret,
    pub(super) token: Option<Secret>,
    /// Where the key was found, for errors.
    pub(super) origin: String,
}

/// Returns the key that the options name, or the environment. `None`: questions are not signed.
pub(super) fn find(
    options: &S3Options,
    credentials: &Credentials,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<Keys>, OpenError> {
    let S3Options { access_key, secret_key_secret, session_token_secret, anonymous, .. } = options;
    let given = access_key.is_some() || secret_key_secret.is_some();
    if *anonymous {
        return match given || session_token_secret.is_some() {
            true => Err(OpenError::new(
                "anonymous=on is for reading without a key: access-key, secret-key-secret and session-token-secret do not go with it",
            )),
            false => Ok(None),
        };
    }
    let keys = match (access_key, secret_key_secret) {
        (Some(access_key), Some(id)) => {
            let token = session_token_secret.as_deref().map(|id| credentials.secret(id));
            Some(Keys {
                access_key: access_key.clone(),
                secret_key: trimmed(&credentials.secret(id)?),
                token: token.transpose()?.map(|token| trimmed(&token)),
                origin: format!("secret '{id}'"),
            })
        }
        (None, None) if session_token_secret.is_none() => match of_environment(environment) {
            Some(keys) => Some(keys),
            None => of_profile(environment)?,
        },
        _ => {
            let why =
                "access-key and secret-key-secret go together, and session-token-secret with both";
            return Err(OpenError::new(why));
        }
    };
    let Some(keys) = keys else {
        return Err(OpenError::new("no key to sign with: neither options nor the environment name one")
            .with_hint(
                "access-key and secret-key-secret, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the daemon's \
                 environment, or ~/.aws/credentials; anonymous=on asks without a signature",
            ));
    };
    // Of a header's value.
    let is_text = |byte: u8| byte.is_ascii_graphic();
    if keys.access_key.is_empty() || !keys.access_key.bytes().all(|b| is_text(b) && b != b'/') {
        return Err(OpenError::new(format!(
            "the access key of {} is not a key's name",
            keys.origin
        )));
    }
    if keys.token.as_ref().is_some_and(|token| !token.iter().all(|byte| is_text(*byte))) {
        return Err(OpenError::new(format!("the session token of {} is not a token", keys.origin)));
    }
    Ok(Some(keys))
}

/// Returns a key without the line's end that a file has behind it.
fn trimmed(secret: &[u8]) -> Secret {
    Secret::new(secret.trim_ascii().to_vec())
}

fn of_environment(environment: &dyn Fn(&str) -> Option<String>) -> Option<Keys> {
    let secret = |name| environment(name).map(|text| Secret::new(text.into_bytes()));
    Some(Keys {
        access_key: environment("AWS_ACCESS_KEY_ID")?,
        secret_key: trimmed(&secret("AWS_SECRET_ACCESS_KEY")?),
        token: secret("AWS_SESSION_TOKEN").map(|token| trimmed(&token)),
        origin: "AWS_ACCESS_KEY_ID".to_owned(),
    })
}

/// Returns the key of the profile that the environment names. `None`: there is no file, and no profile is named.
fn of_profile(environment: &dyn Fn(&str) -> Option<String>) -> Result<Option<Keys>, OpenError> {
    let named = environment("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
    let home = || Some(Path::new(&environment("HOME")?).join(".aws/credentials"));
    let profile = environment("AWS_PROFILE");
    let is_wanted = named.is_some() || profile.is_some();
    let Some(path) = named.or_else(home) else { return Ok(None) };
    let failed = |error| OpenError::io(format!("reading '{}' failed", path.display()), &error);
    let mut text = Secret::new(Vec::new());
    match File::open(&path) {
        Ok(file) => file.take(MAX_FILE).read_to_end(&mut text).map_err(failed)?,
        Err(error) if error.kind() == ErrorKind::NotFound && !is_wanted => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let text = std::str::from_utf8(&text)
        .map_err(|_| OpenError::new(format!("'{}' is not text", path.display())))?;
    let profile = profile.as_deref().unwrap_or("default");
    let origin = format!("profile '{profile}' of '{}'", path.display());
    match of_file(text, profile, &origin) {
        None if is_wanted => {
            let why = format!("{origin} has no aws_access_key_id and aws_secret_access_key");
            Err(OpenError::new(why))
        }
        found => Ok(found),
    }
}

/// Returns the key of a profile in the text of a file.
fn of_file(text: &str, profile: &str, origin: &str) -> Option<Keys> {
    let (mut is_here, mut access_key, mut secret_key, mut token) = (false, None, None, None);
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.split(']').next()) {
            is_here = section.trim() == profile;
        } else if let Some((name, value)) = line.split_once('=').filter(|_| is_here) {
            let value = trimmed(value.as_bytes());
            match name.trim() {
                "aws_access_key_id" => access_key = String::from_utf8(value.to_vec()).ok(),
                "aws_secret_access_key" => secret_key = Some(value),
                "aws_session_token" => token = Some(value),
                _ => {}
            }
        }
    }
    let (access_key, secret_key) = (access_key?, secret_key?);
    Some(Keys { access_key, secret_key, token, origin: origin.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# geheim\n[default]\naws_access_key_id = AKIA1\naws_secret_access_key=s3=cr3t \n\
                        region = x\n[ other ]\naws_secret_access_key=2\naws_access_key_id=AKIA2\n\
                        aws_session_token = t\n[half]\naws_access_key_id=AKIA3\n";

    fn told(keys: &Keys) -> (&str, &[u8], Option<&[u8]>) {
        (&keys.access_key, &keys.secret_key, keys.token.as_deref().map(|token| &**token))
    }

    #[test]
    fn a_file_has_profiles() {
        let of = |profile| of_file(FILE, profile, "");
        assert_eq!(told(&of("default").unwrap()), ("AKIA1", &b"s3=cr3t"[..], None));
        assert_eq!(told(&of("other").unwrap()), ("AKIA2", &b"2"[..], Some(&b"t"[..])));
        assert!(of("half").is_none() && of("none").is_none());
    }

    #[test]
    fn options_come_before_the_environment_and_that_before_profiles() {
        let file = std::env::temp_dir().join(format!("ringmill-keys-{}", std::process::id()));
        std::fs::write(&file, FILE).unwrap();
        let path = file.display().to_string();
        let mut credentials = Credentials::default();
        credentials.add_secret("s", b"of options\n".to_vec().into());
        let find = |options: &S3Options, given: &[(&str, &str)]| {
            find(options, &credentials, &|name| {
                let found = given.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        let none = S3Options::default();
        let all = [
            ("AWS_ACCESS_KEY_ID", "AKIA0"),
            ("AWS_SECRET_ACCESS_KEY", "0"),
            ("AWS_SHARED_CREDENTIALS_FILE", &*path),
            ("AWS_PROFILE", "other"),
        ];
        let given = S3Options {
            access_key: Some("AKIA".into()),
            secret_key_secret: Some("s".into()),
            ..none.clone()
        };
        assert_eq!(told(&find(&given, &all).unwrap().unwrap()), ("AKIA", &b"of options"[..], None));
        assert_eq!(told(&find(&none, &all).unwrap().unwrap()), ("AKIA0", &b"0"[..], None));
        assert_eq!(find(&none, &all[2..]).unwrap().unwrap().access_key, "AKIA2");
        assert_eq!(find(&none, &all[2..3]).unwrap().unwrap().access_key, "AKIA1");
        let anonymous = S3Options { anonymous: true, ..none.clone() };
        assert!(find(&anonymous, &all).unwrap().is_none());

        let why = |options: &S3Options, given: &[(&str, &str)]| match find(options, given) {
            Ok(_) => panic!("found"),
            Err(error) => error.to_string(),
        };
        assert!(why(&none, &[]).contains("no key to sign with"));
        assert!(why(&none, &[("HOME", "/nonexistent")]).contains("no key to sign with"));
        let half = [all[2], ("AWS_PROFILE", "half")];
        assert!(why(&none, &half).contains("profile 'half' of '"), "{}", why(&none, &half));
        let missing = [("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")];
        assert!(why(&none, &missing).contains("reading '/nonexistent' failed"));
        for wrong in [
            S3Options { secret_key_secret: None, ..given.clone() },
            S3Options { access_key: None, ..given.clone() },
            S3Options { session_token_secret: Some("s".into()), ..none.clone() },
            S3Options { anonymous: true, ..given.clone() },
            S3Options { secret_key_secret: Some("missing".into()), ..given.clone() },
            S3Options { access_key: Some("a\nb".into()), ..given.clone() },
            S3Options { session_token_secret: Some("s".into()), ..given.clone() },
        ] {
            let why = why(&wrong, &all);
            assert!(!why.contains("of options"), "{why}");
        }
        std::fs::remove_file(file).unwrap();
    }
}
