//! How a user names an image: a file name, a URL, or options; and what is opened for it.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use block::options::is_url;
use options::table::{look, take};
use options::value::Dialect;
use options::{Object, Value, json, keyval};

use crate::error::Error;

/// An image as a user names it.
///
/// The name is a path, `json:{…}`, or a URL: `nbd://`, `nbd+unix://`, `rbd:`, `http://`, `https://`,
/// `s3://`. Names in the headers of images are not read this way: those are paths.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Source {
    /// The name, or options as `key=value,…`.
    pub name: String,
    /// The format. `None`: detected by the image's header.
    pub format: Option<String>,
    /// `--image-opts`: the name is options.
    pub is_options: bool,
}

impl Source {
    /// Returns the image of that name, in a format that its header tells.
    pub fn new(name: impl Into<String>) -> Source {
        Source { name: name.into(), ..Source::default() }
    }

    /// Returns the image of that name in that format.
    pub fn with_format(name: impl Into<String>, format: impl Into<String>) -> Source {
        Source { name: name.into(), format: Some(format.into()), is_options: false }
    }

    /// Returns the image that the header of `image` names so, or would name.
    pub fn beside(image: &str, name: &str, format: Option<String>) -> Source {
        let folder = path_of(image).and_then(Path::parent);
        let name = match (name.starts_with("json:"), path_of(name), folder) {
            (false, Some(path), Some(folder)) => folder.join(path).display().to_string(),
            _ => name.to_owned(),
        };
        Source { name, format, is_options: false }
    }

    /// Returns options of a node. `driver` is missing where the format has to be detected.
    pub(crate) fn options(&self) -> Result<Given, Error> {
        let mut given = match self.name.strip_prefix("json:") {
            _ if self.is_options => {
                Given { object: keyval::parse(&self.name, None)?.object, dialect: Dialect::Keyval }
            }
            Some(text) => Given { object: json::parse(text)?, dialect: Dialect::Json },
            None => Given { object: named(&self.name)?, dialect: Dialect::Json },
        };
        if self.is_options || self.name.starts_with("json:") {
            given.object = completed(given.object)?;
        } else {
            given.object = vec![("file".to_owned(), Value::Object(given.object))];
        }
        if let Some(format) = &self.format {
            match look(&given.object, "driver").and_then(Value::as_text) {
                None if is_protocol(format) => {
                    if let Some(Value::Object(file)) = take(&mut given.object, "file") {
                        given.object = file;
                    }
                }
                None => given.object.insert(0, ("driver".to_owned(), format.as_str().into())),
                Some(driver) if driver == format => {}
                Some(_) => return Err(Error::new("Driver specified twice")),
            }
        }
        Ok(given)
    }
}

/// Options of a node before their driver is known.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    pub(crate) object: Object,
    pub(crate) dialect: Dialect,
}

/// The drivers of bytes, which a user may give as a format.
fn is_protocol(format: &str) -> bool {
    ["file", "host_device", "nbd", "rbd", "http", "https", "s3"].contains(&format)
}

/// Adds the drivers that QEMU adds to options: that of a file name, below and on top.
fn completed(mut object: Object) -> Result<Object, Error> {
    let has = |object: &Object, name| look(object, name).is_some();
    if let Some(Value::Object(file)) = take(&mut object, "file") {
        object.push(("file".to_owned(), Value::Object(below(file)?)));
    }
    if !has(&object, "driver") && !has(&object, "file") && has(&object, "filename") {
        let file = below(object)?;
        return Ok(vec![("file".to_owned(), Value::Object(file))]);
    }
    Ok(object)
}

/// The same of a node below another.
fn below(mut object: Object) -> Result<Object, Error> {
    if look(&object, "driver").is_some() {
        return completed(object);
    }
    match take(&mut object, "filename") {
        Some(Value::Text(name)) => {
            let mut named = named(&name)?;
            named.extend(object);
            Ok(named)
        }
        Some(_) => Err(Error::new("Invalid parameter type for 'filename', expected: string")),
        None => completed(object),
    }
}

/// The options of the bytes that a file name stands for.
fn named(name: &str) -> Result<Object, Error> {
    let protocol = name.split_once(':').filter(|(before, _)| !before.contains('/'));
    let path = match protocol {
        None => name,
        Some(("file", path)) => path,
        Some(("host_device", path)) => {
            return Ok(object([("driver", "host_device".into()), ("filename", path.into())]));
        }
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("s3") => return s3(rest),
        Some(_) if is_url(name) => {
            let scheme = protocol.map(|(scheme, _)| scheme.to_ascii_lowercase());
            let scheme = scheme.unwrap_or_default();
            return Ok(object([("driver", scheme.into()), ("url", name.into())]));
        }
        Some(("nbd", rest)) if !rest.starts_with("//") => return nbd_legacy(rest),
        Some(("nbd" | "nbd+tcp" | "nbd+unix", rest)) => {
            let is_unix = protocol.is_some_and(|(scheme, _)| scheme == "nbd+unix");
            return nbd_uri(rest, is_unix);
        }
        Some(("rbd", rest)) => return rbd(rest),
        Some((scheme, _)) => return Err(Error::new(format!("Unknown protocol '{scheme}'"))),
    };
    if path.is_empty() {
        return Err(Error::new("The 'file' block driver requires a file name"));
    }
    let metadata = std::fs::metadata(path);
    let is_device = metadata.is_ok_and(|metadata| metadata.file_type().is_block_device());
    let driver = if is_device { "host_device" } else { "file" };
    Ok(object([("driver", driver.into()), ("filename", path.into())]))
}

/// What follows the scheme in `s3://bucket/key`. The key is not encoded.
fn s3(rest: &str) -> Result<Object, Error> {
    let named = rest.strip_prefix("//").and_then(|rest| rest.split_once('/'));
    let (bucket, key) = named.ok_or_else(|| Error::new("s3: expected s3://<bucket>/<key>"))?;
    Ok(object([("driver", "s3".into()), ("bucket", bucket.into()), ("key", key.into())]))
}

fn object<const N: usize>(members: [(&str, Value); N]) -> Object {
    members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The file that a name stands for, if it stands for one.
pub(crate) fn path_of(name: &str) -> Option<&Path> {
    match name.split_once(':').filter(|(before, _)| !before.contains('/')) {
        None => Some(Path::new(name)),
        Some(("file" | "host_device", path)) => Some(Path::new(path)),
        Some(_) => None,
    }
}

fn nbd(server: Object, export: Option<&str>) -> Object {
    let export = export.filter(|name| !name.is_empty()).map(|name| ("export", decoded(name)));
    let members = [("driver", "nbd".into()), ("server", Value::Object(server))];
    let export = export.map(|(name, value)| (name, Value::from(value)));
    members.into_iter().chain(export).map(|(name, value)| (name.to_owned(), value)).collect()
}

/// `nbd:host:port[:exportname=…]`, `nbd:unix:path[:exportname=…]`.
fn nbd_legacy(rest: &str) -> Result<Object, Error> {
    let (server, export) = match rest.split_once(":exportname=") {
        Some((server, export)) => (server, Some(export)),
        None => (rest, None),
    };
    let server = match server.strip_prefix("unix:") {
        Some(path) => object([("type", "unix".into()), ("path", path.into())]),
        None => inet(server)?,
    };
    let mut options = nbd(server, None);
    options.extend(export.map(|name| ("export".to_owned(), name.into())));
    Ok(options)
}

fn inet(server: &str) -> Result<Object, Error> {
    let bad = || Error::new(format!("'{server}' is no NBD server: <host>:<port>"));
    let (host, port) = server.rsplit_once(':').ok_or_else(bad)?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    match host.is_empty() || port.is_empty() {
        true => Err(bad()),
        false => {
            Ok(object([("type", "inet".into()), ("host", host.into()), ("port", port.into())]))
        }
    }
}

/// What follows the scheme in `nbd://host[:port]/export` and `nbd+unix:///export?socket=path`.
fn nbd_uri(rest: &str, is_unix: bool) -> Result<Object, Error> {
    let rest = rest.strip_prefix("//").ok_or_else(|| Error::new("Invalid URI"))?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
    let socket = query.split('&').find_map(|pair| pair.strip_prefix("socket="));
    if is_unix {
        let path = socket.ok_or_else(|| Error::new("Invalid URI: 'socket' is missing"))?;
        let server = object([("type", "unix".into()), ("path", decoded(path).into())]);
        return Ok(nbd(server, Some(export)));
    }
    let after_host = authority.rsplit(']').next().unwrap_or(authority);
    let with_port = match after_host.contains(':') {
        true => authority.to_owned(),
        false => format!("{authority}:10809"),
    };
    Ok(nbd(inet(&with_port)?, Some(export)))
}

/// `%41` is `A`.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = (*first == b'%').then(|| after.get(..2)).flatten();
        let code = code.and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// `rbd:pool[/namespace]/image[@snapshot][:key=value…]`, in which `\` keeps a separator's meaning away.
fn rbd(rest: &str) -> Result<Object, Error> {
    let mut parts = split(rest, ':').into_iter();
    let image = parts.next().unwrap_or_default();
    let mut names = split(&image, '/');
    let (Some(last), true) = (names.pop(), (1..=2).contains(&names.len())) else {
        return Err(Error::new("Pool and image name are required"));
    };
    let mut names = names.into_iter().map(|name| unescaped(&name));
    let mut at = split(&last, '@').into_iter().map(|name| unescaped(&name));
    let mut options = object([("driver", "rbd".into())]);
    let mut add = |name: &str, value: Option<String>| {
        options.extend(value.map(|value| (name.to_owned(), value.into())));
    };
    add("pool", names.next());
    add("namespace", names.next());
    add("image", at.next());
    add("snapshot", at.next());
    for pair in parts {
        let known = pair.split_once('=').map(|(key, value)| (key, unescaped(value)));
        match known {
            Some(("id", value)) => add("user", Some(value)),
            Some(("conf", value)) => add("conf", Some(value)),
            Some((key, _)) => {
                return Err(Error::new(format!("rbd: '{key}' is not supported in a file name"))
                    .with_hint("--image-opts driver=rbd,pool=…,image=… takes all options"));
            }
            None => return Err(Error::new(format!("conf option {pair} has no value"))),
        }
    }
    Ok(options)
}

/// Cuts at a separator without a backslash before it.
fn split(text: &str, separator: char) -> Vec<String> {
    let (mut parts, mut is_escaped) = (vec![String::new()], false);
    for c in text.chars() {
        let is_end = c == separator && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        match parts.last_mut() {
            Some(last) if !is_end => last.push(c),
            _ => parts.push(String::new()),
        }
    }
    parts
}

fn unescaped(text: &str) -> String {
    let mut plain = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        plain.extend(if c == '\\' { chars.next() } else { Some(c) });
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(name: &str) -> String {
        Value::Object(named(name).unwrap()).to_string()
    }

    #[test]
    fn names_stand_for_options() {
        for (name, options) in [
            ("/no/such:file", r#"{"driver":"file","filename":"/no/such:file"}"#),
            ("file:a:b", r#"{"driver":"file","filename":"a:b"}"#),
            (
                "nbd://[::1]/a%20b",
                r#"{"driver":"nbd","server":{"type":"inet","host":"::1","port":"10809"},"export":"a b"}"#,
            ),
            (
                "nbd:unix:/s:exportname=x",
                r#"{"driver":"nbd","server":{"type":"unix","path":"/s"},"export":"x"}"#,
            ),
            (
                "nbd+unix:///?socket=/run/s",
                r#"{"driver":"nbd","server":{"type":"unix","path":"/run/s"}}"#,
            ),
            (
                r"rbd:p/ns/i\@x@s:id=me",
                r#"{"driver":"rbd","pool":"p","namespace":"ns","image":"i@x","snapshot":"s","user":"me"}"#,
            ),
            ("HTTP://h/a", r#"{"driver":"http","url":"HTTP://h/a"}"#),
            ("s3://b/a%20/b c", r#"{"driver":"s3","bucket":"b","key":"a%20/b c"}"#),
        ] {
            let read: serde_json::Value = serde_json::from_str(&text(name)).unwrap();
            let expected: serde_json::Value = serde_json::from_str(options).unwrap();
            assert_eq!(read, expected, "{name}");
        }
        assert_eq!(named("foo:bar").unwrap_err().message(), "Unknown protocol 'foo'");
        assert!(named("rbd:pool").is_err() && named("nbd:host").is_err() && named("").is_err());
    }
}
