//! `tls-creds-x509`: certificates and keys for TLS.

use std::path::Path;

use tls::{Endpoint, X509Files};

use super::{ObjectOptions, ObjectType, TypeRow, check_id};
use crate::error::OptionError;
use crate::place::OneOf;
use crate::table::{Field, Row, Table, not_yet, put};

/// `tls-creds-x509`: certificates and keys for TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsCredsOptions {
    /// `id`: its name.
    pub id: String,
    /// `dir`, `endpoint`, `verify-peer`, `sanity-check`.
    pub files: X509Files,
}

impl Default for TlsCredsOptions {
    fn default() -> Self {
        let files = X509Files {
            dir: "".into(),
            endpoint: Endpoint::Client,
            verify_peer: true,
            sanity_check: true,
        };
        TlsCredsOptions { id: String::new(), files }
    }
}

impl ObjectType for TlsCredsOptions {
    fn id(&self) -> &str {
        &self.id
    }

    fn type_name(&self) -> &'static str {
        "tls-creds-x509"
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.files.dir)
    }
}

pub(super) static TLS_CREDS_X509: TypeRow = TypeRow {
    name: "tls-creds-x509",
    help: "certificates and a key for TLS, from the files of a folder",
    example: "tls-creds-x509,id=tls0,endpoint=server,dir=/etc/pki/qemu",
    parent: "tls-creds",
    table: &Table {
        fields: FIELDS,
        build: |creds: TlsCredsOptions| {
            if creds.files.dir.as_os_str().is_empty() {
                return Err(OptionError::new("Missing 'dir' property value"));
            }
            Ok(ObjectOptions::TlsCreds(creds))
        },
    },
};

static FIELDS: &[Field<TlsCredsOptions>] = &[
    Row::required("id", "name of the credentials, for tls-creds to refer to")
        .text("<id>", |creds, id| put(&mut creds.id, check_id(id)?)),
    Row::required(
        "dir",
        "folder with ca-cert.pem, server-cert.pem and server-key.pem (or client-…), and \
         where certificates are revoked, ca-crl.pem",
    )
    .path(|creds, dir| put(&mut creds.files.dir, dir)),
    Row::default("endpoint", "client", "the side that uses them").at(&OneOf {
        at: |creds: &mut TlsCredsOptions| &mut creds.files.endpoint,
        words: &[
            ("client", Endpoint::Client, "for a client"),
            ("server", Endpoint::Server, "for a server"),
        ],
    }),
    Row::default("verify-peer", "on", "refuse clients without a certificate of the CA")
        .bool(|creds, on| put(&mut creds.files.verify_peer, on)),
    Row::default(
        "sanity-check",
        "on",
        "when reading the files, refuse certificates that all peers would refuse",
    )
    .bool(|creds, on| put(&mut creds.files.sanity_check, on)),
    Field::unoffered("priority", |creds, value, name, at| {
        not_yet(creds, value, name, at).map_err(|error| {
            error.hint(
                "It is GnuTLS' own. TLS 1.3 and 1.2 with AES-GCM and ChaCha20-Poly1305 is all there \
                 is to choose from.",
            )
        })
    }),
    Field::unoffered("passwordid", |creds, value, name, at| {
        not_yet(creds, value, name, at)
            .map_err(|error| error.hint("Keys must not be encrypted; openssl pkey decrypts them."))
    }),
];
