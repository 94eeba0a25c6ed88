//! The web server.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::nbd::free_port;
use crate::peers::contender::in_path;
use crate::peers::server::Server;
use crate::session::Session;

/// nginx, serving the session's directory. It is ended when this is dropped.
pub(super) struct Nginx {
    _server: Server,
    pub(super) port: u16,
    pub(super) version: String,
}

impl Nginx {
    /// Starts it on the client's CPU.
    pub(super) fn start(session: &Session) -> Result<Self> {
        let unpacked =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/nginx/usr/sbin/nginx");
        let program = Some(unpacked).filter(|path| path.is_file()).or_else(|| in_path("nginx"));
        let program = program.context("nginx is missing; scripts/setup-tests.sh unpacks it")?;
        let port = free_port()?;
        let directory = &session.directory;
        let config = directory.join("nginx.conf");
        fs::write(&config, configuration(directory, port)).context("writing nginx.conf")?;
        let command =
            [program.clone().into(), "-p".into(), directory.into(), "-c".into(), config.into()];
        let mut server = Server::spawn("nginx", &command, &[], session.cpus.client, directory)?;
        server.wait_until(|| Ok(TcpStream::connect(("127.0.0.1", port)).is_ok()))?;
        Ok(Self { _server: server, port, version: version(&program)? })
    }
}

fn configuration(directory: &Path, port: u16) -> String {
    let directory = directory.display();
    let folders: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {directory}/nginx-{kind};\n"))
        .concat();
    // Workers run as another user by default, which may not read the directory.
    format!(
        "user root; daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log stderr;\n\
         events {{}}\n\
         http {{ access_log off; sendfile on; {folders}\
         server {{ listen 127.0.0.1:{port}; root {directory}; }} }}\n"
    )
}

/// nginx prints its version to standard error.
fn version(program: &PathBuf) -> Result<String> {
    let output =
        std::process::Command::new(program).arg("-v").output().context("starting nginx")?;
    let text = String::from_utf8_lossy(&output.stderr);
    Ok(text.trim().trim_start_matches("nginx version: ").to_owned())
}
