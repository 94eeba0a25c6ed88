//! The part of HTTP/1.1 (RFC 9112) needed to serve one page: parses requests and formats answers,
//! without I/O.

use super::accept::{Accept, Format};

/// Longest head of a request in bytes.
pub const MAX_HEAD: usize = 8 << 10;

/// The path of the metrics.
pub const PATH: &str = "/metrics";

/// A client's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// `GET` or `HEAD` of the metrics.
    Metrics {
        /// The format of the page.
        format: Format,
        /// Only the head is sent.
        head_only: bool,
    },
    /// Any other request.
    Refused(Status),
}

/// The status that refuses a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// 400: the request cannot be parsed.
    BadRequest,
    /// 404: the path is not [`PATH`].
    NotFound,
    /// 405: the method is neither `GET` nor `HEAD`.
    MethodNotAllowed,
    /// 431: the head is longer than [`MAX_HEAD`].
    HeadTooLarge,
    /// 503: the daemon is ending.
    Unavailable,
    /// 505: the version is not HTTP/1.x.
    VersionNotSupported,
}

impl Status {
    fn line(self) -> &'static str {
        match self {
            Status::BadRequest => "400 Bad Request",
            Status::NotFound => "404 Not Found",
            Status::MethodNotAllowed => "405 Method Not Allowed",
            Status::HeadTooLarge => "431 Request Header Fields Too Large",
            Status::Unavailable => "503 Service Unavailable",
            Status::VersionNotSupported => "505 HTTP Version Not Supported",
        }
    }

    /// The text of the answer, for readers.
    fn body(self) -> String {
        match self {
            Status::NotFound => format!("{}: the metrics are at {PATH}\n", self.line()),
            _ => format!("{}\n", self.line()),
        }
    }
}

/// Parses a request. `None`: it is incomplete.
///
/// `bytes`: everything received so far.
pub fn parse(bytes: &[u8]) -> Option<Asked> {
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
        // A malformed or overlong head is refused without its end.
        let wrong = bytes.contains(&0) || bytes.len() > MAX_HEAD;
        return wrong.then_some(Asked::Refused(match bytes.len() > MAX_HEAD {
            true => Status::HeadTooLarge,
            false => Status::BadRequest,
        }));
    };
    // The result must not depend on where the stream is divided.
    if end + 4 > MAX_HEAD {
        return Some(Asked::Refused(Status::HeadTooLarge));
    }
    let head = bytes
        .get(..end)
        .filter(|head| !head.contains(&0))
        .and_then(|head| std::str::from_utf8(head).ok());
    let asked = head.ok_or(Status::BadRequest).and_then(read_head);
    Some(asked.unwrap_or_else(Asked::Refused))
}

fn read_head(head: &str) -> Result<Asked, Status> {
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Status::BadRequest);
    };
    let minor = match version.strip_prefix("HTTP/1.").map(str::as_bytes) {
        Some([minor @ b'0'..=b'9']) => *minor,
        _ if version.starts_with("HTTP/") => return Err(Status::VersionNotSupported),
        _ => return Err(Status::BadRequest),
    };
    let mut hosts = 0;
    let mut accept = Accept::default();
    for line in lines {
        let (name, value) = line.split_once(':').ok_or(Status::BadRequest)?;
        let is_token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
        if name.is_empty() || !name.chars().all(is_token) {
            return Err(Status::BadRequest);
        }
        hosts += u32::from(name.eq_ignore_ascii_case("host"));
        if name.eq_ignore_ascii_case("accept") {
            accept.add(value);
        }
    }
    // RFC 9112, section 3.2.
    if hosts > 1 || (hosts == 0 && minor > b'0') {
        return Err(Status::BadRequest);
    }
    if path(target) != PATH {
        return Err(Status::NotFound);
    }
    let format = accept.format();
    match method {
        "GET" => Ok(Asked::Metrics { format, head_only: false }),
        "HEAD" => Ok(Asked::Metrics { format, head_only: true }),
        _ => Err(Status::MethodNotAllowed),
    }
}

/// Returns the path of a request target. The target may begin with scheme and host.
fn path(target: &str) -> &str {
    let local = match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
        None => target,
    };
    local.split(['?', '#']).next().unwrap_or_default()
}

/// Returns an answer with a page.
pub fn page(content_type: &str, body: &str, head_only: bool) -> String {
    answer("200 OK", content_type, "", body, head_only)
}

/// Returns an answer that refuses a request.
pub fn refusal(status: Status) -> String {
    let more = match status {
        Status::MethodNotAllowed => "Allow: GET, HEAD\r\n",
        _ => "",
    };
    answer(status.line(), "text/plain; charset=utf-8", more, &status.body(), false)
}

fn answer(status: &str, content_type: &str, more: &str, body: &str, head_only: bool) -> String {
    let len = body.len();
    let body = if head_only { "" } else { body };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len}\r\n\
         Cache-Control: no-store\r\nVary: Accept\r\nConnection: close\r\n{more}\r\n{body}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: Option<Asked> =
        Some(Asked::Metrics { format: Format::Classic, head_only: false });

    fn refused(status: Status) -> Option<Asked> {
        Some(Asked::Refused(status))
    }

    #[test]
    fn a_request_is_the_same_wherever_the_stream_is_cut() {
        let request = b"GET /metrics HTTP/1.1\r\nHost: h:1\r\nAccept: */*\r\n\r\n";
        for cut in 0..request.len() {
            assert_eq!(parse(&request[..cut]), None, "{cut}");
        }
        assert_eq!(parse(request), METRICS);
    }

    #[test]
    fn requests_are_answered_by_the_standard() {
        let whole = |line: &str| parse(format!("{line}\r\nHost: h\r\n\r\n").as_bytes());
        assert_eq!(whole("GET /metrics HTTP/1.1"), METRICS);
        assert_eq!(whole("GET /metrics?name=x HTTP/1.0"), METRICS);
        assert_eq!(whole("GET http://h:9/metrics HTTP/1.1"), METRICS);
        let head = Asked::Metrics { format: Format::Classic, head_only: true };
        assert_eq!(whole("HEAD /metrics HTTP/1.1"), Some(head));
        assert_eq!(whole("POST /metrics HTTP/1.1"), refused(Status::MethodNotAllowed));
        for target in ["/", "/metricsx", "http://h", "*", "/metrics/"] {
            let line = format!("GET {target} HTTP/1.1");
            assert_eq!(whole(&line), refused(Status::NotFound), "{line}");
        }
        for line in
            ["GET /metrics", "GET  /metrics HTTP/1.1", "", "GET /metrics HTTP/1.1 x", "x y z"]
        {
            assert_eq!(whole(line), refused(Status::BadRequest), "{line}");
        }
        for version in ["HTTP/2", "HTTP/1.", "HTTP/1.10", "HTTP/0.9"] {
            let line = format!("GET /metrics {version}");
            assert_eq!(whole(&line), refused(Status::VersionNotSupported), "{line}");
        }
    }

    #[test]
    fn headers_are_checked() {
        let with =
            |headers: &str| parse(format!("GET /metrics HTTP/1.1{headers}\r\n\r\n").as_bytes());
        assert_eq!(with("\r\nhOST:"), METRICS);
        let open = Asked::Metrics { format: Format::OpenMetrics, head_only: false };
        let accept =
            "\r\nHost: a\r\naccept: text/plain;q=0.1\r\nAccept: application/openmetrics-text";
        assert_eq!(with(accept), Some(open));
        for headers in [
            "",
            "\r\nHost: a\r\nHost: b",
            "\r\nHost",
            "\r\nHost : a",
            "\r\nHost: a\r\n b: c",
            "\r\n: a",
        ] {
            assert_eq!(with(headers), refused(Status::BadRequest), "{headers:?}");
        }
        let long = |len: usize| with(&format!("\r\nHost: a\r\nX: {}", "x".repeat(len)));
        assert_eq!(long(MAX_HEAD - 100), METRICS);
        assert_eq!(long(MAX_HEAD), refused(Status::HeadTooLarge));
        assert_eq!(parse(&vec![b'x'; MAX_HEAD]), None);
        assert_eq!(parse(&vec![b'x'; MAX_HEAD + 1]), refused(Status::HeadTooLarge));
        assert_eq!(parse(b"GET \xff HTTP/1.1\r\nHost: h\r\n\r\n"), refused(Status::BadRequest));
        assert_eq!(parse(b"\0"), refused(Status::BadRequest));
    }

    #[test]
    fn an_answer_tells_its_length() {
        let whole = page("text/x", "body\n", false);
        assert!(
            whole.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 5\r\n")
        );
        assert!(whole.ends_with("\r\n\r\nbody\n"));
        assert!(page("text/x", "body\n", true).ends_with("Connection: close\r\n\r\n"));
        assert!(refusal(Status::MethodNotAllowed).contains("\r\nAllow: GET, HEAD\r\n\r\n405 "));
    }
}
