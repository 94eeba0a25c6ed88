//! Certificates for TLS, made by GnuTLS' certtool, in folders as QEMU's programs and libnbd expect them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Scratch, tool};

/// A certificate authority with its key.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
    name: &'static str,
}

/// Validity of certificates, in lines of certtool's template.
pub const NOW: &str = "expiration_days = 2";
/// Expired.
pub const LONG_AGO: &str =
    "activation_date = \"2020-01-01 00:00:00\"\nexpiration_date = \"2021-01-01 00:00:00\"";

const EC: &[&str] = &["--key-type", "ecdsa"];
/// The only key type that QEMU 10.0 accepts for a client.
const RSA: &[&str] = &["--key-type", "rsa", "--bits", "2048"];

impl Authority {
    /// Makes an authority.
    pub fn new(scratch: &Scratch, name: &'static str) -> Self {
        let authority = Authority { dir: scratch.path(&format!("authority-{name}")), name };
        fs::create_dir(&authority.dir).expect("a folder");
        key(&authority.path("key.pem"), EC);
        let template = authority.path("template");
        let lines = format!("cn = {name}\nca\ncert_signing_key\n{NOW}\n");
        fs::write(&template, lines).expect("a template");
        let mut command = Command::new(tool("certtool"));
        command.arg("--generate-self-signed").arg("--load-privkey").arg(authority.path("key.pem"));
        command.arg("--template").arg(template).arg("--outfile").arg(authority.certificate());
        run(command);
        authority
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Its certificate.
    pub fn certificate(&self) -> PathBuf {
        self.path("cert.pem")
    }

    /// A folder of credentials that trusts this authority and has no certificate.
    pub fn trusted(&self, folder: &str) -> PathBuf {
        let folder = self.dir.with_file_name(format!("{folder}-of-{}", self.name));
        fs::create_dir(&folder).expect("a folder");
        fs::copy(self.certificate(), folder.join("ca-cert.pem")).expect("a copy");
        folder
    }

    /// A folder of a server's credentials, for `localhost`.
    pub fn server(&self, folder: &str, valid: &str) -> PathBuf {
        self.server_with(folder, EC, valid)
    }

    /// Makes a folder of a server's credentials, with an RSA key of this size.
    pub fn server_with_rsa(&self, folder: &str, bits: u32) -> PathBuf {
        self.server_with(folder, &["--key-type", "rsa", "--bits", &bits.to_string()], NOW)
    }

    fn server_with(&self, folder: &str, kind: &[&str], valid: &str) -> PathBuf {
        let folder = self.trusted(folder);
        let lines = "cn = localhost\ndns_name = localhost\nip_address = 127.0.0.1\ntls_www_server";
        self.sign(&folder, "server", kind, lines, valid);
        folder
    }

    /// A folder of a client's credentials, for the name `O=Ringmill,CN=name`.
    pub fn client(&self, name: &str, valid: &str) -> PathBuf {
        let folder = self.trusted(name);
        let lines = format!("organization = Ringmill\ncn = {name}\ntls_www_client");
        self.sign(&folder, "client", RSA, &lines, valid);
        folder
    }

    fn sign(&self, folder: &Path, side: &str, kind: &[&str], lines: &str, valid: &str) {
        let own = folder.join(format!("{side}-key.pem"));
        key(&own, kind);
        let template = folder.join("template");
        let lines = format!("{lines}\nsigning_key\nencryption_key\n{valid}\n");
        fs::write(&template, lines).expect("a template");
        let mut command = Command::new(tool("certtool"));
        command.arg("--generate-certificate").arg("--load-privkey").arg(own);
        command.arg("--load-ca-certificate").arg(self.certificate());
        command.arg("--load-ca-privkey").arg(self.path("key.pem"));
        command.arg("--template").arg(template);
        command.arg("--outfile").arg(folder.join(format!("{side}-cert.pem")));
        run(command);
    }
}

fn key(path: &Path, kind: &[&str]) {
    let mut command = Command::new(tool("certtool"));
    command.arg("--generate-privkey").args(kind).arg("--outfile").arg(path);
    run(command);
}

fn run(mut command: Command) {
    let output = command.output().expect("certtool runs");
    assert!(output.status.success(), "{command:?}: {output:?}");
}
