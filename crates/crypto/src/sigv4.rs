//! Signatures of requests to object stores: AWS Signature Version 4, as S3 has it.
//!
//! <https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html>

use hmac::{Hmac, Mac};
use sha2::Sha256;
use sha2::digest::Digest;
use zeroize::Zeroizing;

/// The hash of a request without a body: the value of `x-amz-content-sha256`.
pub const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// Who signs, and for which region of which service.
#[derive(Clone, Copy)]
pub struct Signer<'a> {
    /// The public name of the key.
    pub access_key: &'a str,
    /// The key.
    pub secret_key: &'a [u8],
    /// The region: `us-east-1`.
    pub region: &'a str,
    /// The service: `s3`.
    pub service: &'a str,
}

/// A request as it is sent.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The method: `GET`.
    pub method: &'a str,
    /// The path, [encoded](encode_path).
    pub path: &'a str,
    /// The query, encoded, its parameters in order. Empty: there is none.
    pub query: &'a str,
    /// The headers to sign, with `host`, by lower-case names, in order.
    pub headers: &'a [(&'a str, &'a str)],
    /// The hash of the body, in hexadecimal.
    pub payload: &'a str,
}

impl Signer<'_> {
    /// Returns the value of the header `Authorization`. `time`: that of `x-amz-date`, as `20130524T000000Z`.
    #[must_use]
    pub fn authorization(&self, request: &Request<'_>, time: &str) -> String {
        let Signer { access_key, secret_key, region, service } = self;
        let names: Vec<_> = request.headers.iter().map(|(name, _)| *name).collect();
        let names = names.join(";");
        let mut canonical = format!("{}\n{}\n{}\n", request.method, request.path, request.query);
        for (name, value) in request.headers {
            canonical.extend([name, ":", value.trim(), "\n"]);
        }
        canonical.extend(["\n", &names, "\n", request.payload]);
        let date = time.split('T').next().unwrap_or_default();
        let scope = format!("{date}/{region}/{service}/aws4_request");
        let hash = hex(&Sha256::digest(canonical));
        let to_sign = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{hash}");
        let secret = Zeroizing::new([b"AWS4", *secret_key].concat());
        let key = mac(&secret, date);
        let key = [region, service, "aws4_request"].iter().fold(key, |key, part| mac(&*key, part));
        let signature = hex(&*mac(&*key, &to_sign));
        format!(
            "AWS4-HMAC-SHA256 Credential={access_key}/{scope},SignedHeaders={names},Signature={signature}"
        )
    }
}

/// Returns a name as a part of a path: each byte but letters, digits, `-`, `.`, `_`, `~` and `/` as `%` and its number.
#[must_use]
pub fn encode_path(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                encoded.push(byte.into());
            }
            other => encoded.push_str(&format!("%{other:02X}")),
        }
    }
    encoded
}

fn mac(key: &[u8], text: &str) -> Zeroizing<[u8; 32]> {
    // HMAC takes keys of any length.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return Zeroizing::default() };
    mac.update(text.as_bytes());
    Zeroizing::new(mac.finalize().into_bytes().into())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of S3's documentation, "Signature calculations for the Authorization header".
    #[test]
    fn signatures_are_those_of_the_documentation_of_s3() {
        const SIGNER: Signer<'_> = Signer {
            access_key: "AKIAIOSFODNN7EXAMPLE",
            secret_key: b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
            region: "us-east-1",
            service: "s3",
        };
        const TIME: &str = "20130524T000000Z";
        const HOST: (&str, &str) = ("host", "examplebucket.s3.amazonaws.com");
        const DATE: (&str, &str) = ("x-amz-date", TIME);
        const HASH: (&str, &str) = ("x-amz-content-sha256", EMPTY);
        let signed = |path: &str, query: &str, headers: &[(&str, &str)], names: &str| {
            let request = Request { method: "GET", path, query, headers, payload: EMPTY };
            let whole = SIGNER.authorization(&request, TIME);
            let start = format!(
                "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,\
                 SignedHeaders={names},Signature="
            );
            whole.strip_prefix(&start).unwrap_or_else(|| panic!("{whole}")).to_owned()
        };
        let range = [HOST, ("range", "bytes=0-9"), HASH, DATE];
        assert_eq!(
            signed("/test.txt", "", &range, "host;range;x-amz-content-sha256;x-amz-date"),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
        let names = "host;x-amz-content-sha256;x-amz-date";
        for (query, signature) in [
            ("lifecycle=", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
            (
                "max-keys=2&prefix=J",
                "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
            ),
        ] {
            assert_eq!(signed("/", query, &[HOST, HASH, DATE], names), signature);
        }
        let put = "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072";
        let headers = [
            ("date", "Fri, 24 May 2013 00:00:00 GMT"),
            HOST,
            ("x-amz-content-sha256", put),
            DATE,
            ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
        ];
        let path = format!("/{}", encode_path("test$file.text"));
        let request =
            Request { method: "PUT", path: &path, query: "", headers: &headers, payload: put };
        let whole = SIGNER.authorization(&request, TIME);
        let signature = "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd";
        assert!(whole.ends_with(signature), "{whole}");
    }

    /// `get-utf8` and `get-unreserved` of the test suite for Signature Version 4.
    #[test]
    fn signatures_are_those_of_the_test_suite() {
        const TIME: &str = "20150830T123600Z";
        let signer = Signer {
            access_key: "AKIDEXAMPLE",
            secret_key: b"wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
            region: "us-east-1",
            service: "service",
        };
        let headers = [("host", "example.amazonaws.com"), ("x-amz-date", TIME)];
        let unreserved = "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        for (name, signature) in [
            ("ሴ", "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"),
            (unreserved, "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f"),
        ] {
            let path = format!("/{}", encode_path(name));
            let request = Request {
                method: "GET",
                path: &path,
                query: "",
                headers: &headers,
                payload: EMPTY,
            };
            let whole = signer.authorization(&request, TIME);
            assert!(whole.ends_with(signature), "{name}: {whole}");
        }
    }

    #[test]
    fn names_are_encoded_as_the_signature_has_them() {
        assert_eq!(encode_path("a/b c+d%e&ü~"), "a/b%20c%2Bd%25e%26%C3%BC~");
    }
}
