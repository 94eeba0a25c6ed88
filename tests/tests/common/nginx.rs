//! A real web server.

use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use integration::nbd::{nbd_export, nbd_server};
use integration::tls::{Authority, NOW};
use integration::{
    Image, Port, Scratch, Server, ServerCommand, eventually, repository, tied_command,
};

/// MiB of the image, and a part of a sector.
pub const MIB: u64 = 6;

/// nginx, with the image `disk.img`, in the clear and with TLS.
pub struct Nginx<'a> {
    scratch: &'a Scratch,
    pub plain: Port,
    tls: Port,
    /// The certificate by which clients trust the server.
    pub authority: PathBuf,
    child: Option<Child>,
}

impl<'a> Nginx<'a> {
    pub fn new(scratch: &'a Scratch) -> Nginx<'a> {
        let authority = Authority::new(scratch, "ca");
        let creds = authority.server("nginx", NOW);
        let folder = scratch.path("web");
        fs::create_dir(&folder).expect("a folder");
        let image = Image::filled(scratch, "web/disk.img", MIB);
        let file = fs::OpenOptions::new().append(true).open(image.path()).expect("the image");
        file.set_len((MIB << 20) + 100).expect("a longer file");
        // "user" with "pass word".
        fs::write(scratch.path("users"), "user:{PLAIN}pass word\n").expect("a file");
        let (plain, tls) = (Port::new(), Port::new());
        let mut config = format!(
            "daemon off; worker_processes 1; pid {0}/pid; error_log {0}/nginx.log;\n\
             events {{}}\n\
             http {{ access_log {0}/access.log;\n",
            scratch.dir().display()
        );
        for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
            let folder = scratch.path(kind);
            config += &format!("{kind}_temp_path {};\n", folder.display());
        }
        let dir = scratch.dir().display();
        config += &format!(
            "server {{ listen 127.0.0.1:{}; listen 127.0.0.1:{} ssl http2; root {};\n\
             ssl_certificate {creds}/server-cert.pem; ssl_certificate_key {creds}/server-key.pem;\n\
             location /whole/ {{ alias {dir}/web/; max_ranges 0; }}\n\
             location /slow/ {{ alias {dir}/web/; limit_rate 1m; }}\n\
             location /moved/ {{ return 302 /disk.img; }}\n\
             location /away/ {{ return 302 https://localhost:{}/disk.img; }}\n\
             location /private/ {{ alias {dir}/web/; auth_basic x; auth_basic_user_file {dir}/users; }}\n\
             }} }}\n",
            plain.number(),
            tls.number(),
            folder.display(),
            tls.number(),
            creds = creds.display(),
        );
        fs::write(scratch.path("nginx.conf"), config).expect("a file");
        let authority = authority.certificate();
        let mut nginx = Nginx { scratch, plain, tls, authority, child: None };
        nginx.start();
        nginx
    }

    pub fn start(&mut self) {
        let program = repository().join("target/nginx/usr/sbin/nginx");
        assert!(program.is_file(), "nginx is not unpacked: run scripts/setup-tests.sh");
        let child = tied_command(&program)
            .arg("-p")
            .arg(self.scratch.dir())
            .arg("-c")
            .arg(self.scratch.path("nginx.conf"))
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(child.expect("nginx runs"));
        let address = ("127.0.0.1", self.plain.number());
        eventually("nginx", || TcpStream::connect(address).ok());
    }

    /// Ends it at once, with its connections.
    pub fn kill(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // Master and worker are two processes: a fast shutdown ends both.
        let pid = nix::unistd::Pid::from_raw(child.id().try_into().expect("a pid"));
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("it runs");
        child.wait().expect("our child");
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://localhost:{}{path}", self.plain.number())
    }

    pub fn tls_url(&self, path: &str) -> String {
        format!("https://localhost:{}{path}", self.tls.number())
    }

    pub fn image(&self) -> String {
        self.scratch.path("web/disk.img").display().to_string()
    }

    /// Starts a daemon with a node, which trusts the server.
    pub fn daemon(&self, scratch: &Scratch, node: &str) -> Server {
        let authority = self.authority.display().to_string();
        let command = ServerCommand::new(scratch).iothread("a").env("SSL_CERT_FILE", authority);
        let secret = format!("secret,id=password,data={}", "pass word");
        let command = command.arg("--object").arg(secret);
        let command = command.arg("--blockdev").arg(format!("{node},node-name=web,read-only=on"));
        nbd_export(nbd_server(command, scratch, ""), "web", ",iothread=a").start()
    }
}

impl Drop for Nginx<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}
