//! Connections to clusters: one per configuration and user, shared by all images.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use event_loop::sync::lock;
use event_loop::{EventLoop, oneshot, until};
use nix::errno::Errno;
use rbd::{
    CONNECTING, Cluster, Config, Creation, Encryption, Format, Image, ImageName, Key, Library,
    LoadError, Loading,
};

use super::jobs::{Jobs, Threads};
use super::options::RbdOptions;
use crate::connections::Credentials;
use crate::error::OpenError;
use crate::services::DriverServices;

/// How long connecting, with opening or creating, may take, nanoseconds.
const PATIENCE_NS: u64 = 35_000_000_000;
/// Options that the configuration file may set otherwise. A monitor that is gone is an error sooner than after
/// Ceph's five minutes.
const DEFAULTS: &[(&str, &str)] = &[("client_mount_timeout", "30")];
/// The library listens nowhere.
const ADMIN_SOCKET: (&str, &str) = ("admin_socket", "");

/// What all `rbd` nodes of a process share.
pub(super) struct Connections {
    library: Arc<Library>,
    clusters: Clusters,
    /// Dropped last: waits for calls.
    threads: Threads,
}

/// A lock per configuration, so that nodes that are opened at the same time share a connection.
type Clusters = Arc<Mutex<HashMap<Config, Arc<Mutex<Weak<Cluster>>>>>>;

/// The secrets that options name.
pub(super) struct Secrets {
    key: Option<Key>,
    encryption: Option<Encryption>,
}

impl Secrets {
    pub(super) fn of(options: &RbdOptions, credentials: &Credentials) -> Result<Self, OpenError> {
        let RbdOptions { key_secret, encrypt, .. } = options;
        let key = key_secret.as_deref().map(|id| credentials.secret(id)).transpose()?;
        let encryption = encrypt.as_ref().map(|encrypt| encrypt.encryption(credentials));
        // The secret is the key itself, as in QSD. Ceph takes base64.
        let key = key.map(|key| Key::new(crypto::secret::to_base64(&key)));
        Ok(Secrets { key, encryption: encryption.transpose()? })
    }
}

/// An image that a thread closes, because closing blocks.
pub(super) struct OpenImage {
    image: Option<Arc<Image>>,
    jobs: Jobs,
    /// Sent once the image is closed.
    closed: Option<oneshot::Sender<()>>,
}

impl OpenImage {
    pub(super) fn get(&self) -> Option<&Arc<Image>> {
        self.image.as_ref()
    }

    /// Returns the receiver of the end of the image.
    pub(super) fn tell_closed(&mut self) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        self.closed = Some(sender);
        receiver
    }
}

impl Drop for OpenImage {
    fn drop(&mut self) {
        let (image, closed) = (self.image.take(), self.closed.take());
        self.jobs.post(move || {
            drop(image);
            if let Some(closed) = closed {
                closed.send(());
            }
        });
    }
}

/// An image that was opened, for a node.
pub(super) struct Opened {
    pub(super) image: OpenImage,
    pub(super) size: u64,
    /// The encryption format of the contents.
    pub(super) format: Option<Format>,
    pub(super) jobs: Jobs,
}

/// Loads the library, for a process that loads none later.
pub(super) fn load_library() -> Result<(), OpenError> {
    Library::load(Loading::Allowed).map(drop).map_err(|error| load_failed(&error))
}

fn load_failed(error: &LoadError) -> OpenError {
    let error = OpenError::new(error.to_string()).with_hint(match error {
        LoadError::Missing(_) => "Install the package librbd1 (Debian, Ubuntu; librbd elsewhere)",
        LoadError::TooOld(_) => "Ceph 16 (Pacific) or later is needed",
        LoadError::Forbidden => "Start the daemon with an rbd node, or with --sandbox drivers=rbd",
    });
    error.with_hint_everywhere()
}

impl Connections {
    /// Returns the connections of a process, made by its first `rbd` node.
    pub(super) fn of(services: &DriverServices) -> Result<Arc<Connections>, OpenError> {
        services.shared(|| {
            let loading = match services.is_sealed() {
                true => Loading::Forbidden,
                false => Loading::Allowed,
            };
            let library = Library::load(loading).map_err(|error| load_failed(&error))?;
            let threads = Threads::start(services.library_birth())?;
            Ok(Connections { library, clusters: Arc::default(), threads })
        })
    }

    /// Opens an image.
    pub(super) async fn open(
        &self,
        event_loop: &EventLoop,
        options: &RbdOptions,
        secrets: Secrets,
    ) -> Result<Opened, OpenError> {
        let (name, jobs) = (name_of(options), self.threads.jobs());
        let Secrets { key, encryption } = secrets;
        let opened = self.call(event_loop, options, key, "opened", move |cluster| {
            let image = Image::open(&cluster, &name, encryption.as_ref())?;
            let (size, format) = (image.size()?, image.encryption_format()?);
            Ok((image, size, format))
        });
        let (image, size, format) = opened.await?;
        let image = OpenImage { image: Some(Arc::new(image)), jobs: jobs.clone(), closed: None };
        Ok(Opened { image, size, format, jobs })
    }

    /// Creates an image.
    pub(super) async fn create(
        &self,
        event_loop: &EventLoop,
        options: &RbdOptions,
        secrets: Secrets,
        creation: Creation,
    ) -> Result<(), OpenError> {
        let name = name_of(options);
        let create = move |cluster| Image::create(&cluster, &name, creation);
        self.call(event_loop, options, secrets.key, "created", create).await
    }

    /// Calls `call` with the connection that the options name. `done`: what the image is afterwards.
    async fn call<T: Send + 'static>(
        &self,
        event_loop: &EventLoop,
        options: &RbdOptions,
        key: Option<Key>,
        done: &str,
        call: impl FnOnce(Arc<Cluster>) -> Result<T, rbd::Error> + Send + 'static,
    ) -> Result<T, OpenError> {
        let config = config(options, key);
        let (library, clusters) = (self.library.clone(), self.clusters.clone());
        let called = self.threads.jobs().run(move || {
            let cluster = connect(&library, &clusters, config)?;
            call(cluster)
        });
        match within(event_loop, PATIENCE_NS, called).await {
            Some(Ok(result)) => result.map_err(|error| call_failed(options, error)),
            Some(Err(_)) => Err(OpenError::new("rbd: no thread can be started")),
            None => Err(too_slow(options, done)),
        }
    }
}

/// The call still runs on its thread: the library cannot cancel it.
fn too_slow(options: &RbdOptions, done: &str) -> OpenError {
    let (image, seconds) = (shown(options), PATIENCE_NS / 1_000_000_000);
    let why = format!("not {done} within {seconds} seconds; the library is still at it");
    let hint = "'ceph -s' shows whether the cluster answers; a busy machine takes long for a key of encryption";
    OpenError::new(format!("rbd image {image}: {why}")).with_hint(hint).with_hint_everywhere()
}

fn call_failed(options: &RbdOptions, error: rbd::Error) -> OpenError {
    let rbd::Error { what, errno, says_why } = error;
    if says_why {
        return OpenError::new(what);
    }
    let hint = match errno {
        Errno::EACCES | Errno::EPERM | Errno::ENOENT if what == CONNECTING => {
            let user = options.user.as_deref().unwrap_or("admin");
            format!(
                "The daemon has to be able to read the key of client.{user}: in /etc/ceph, beside conf, or in a folder \
                 of --sandbox paths="
            )
        }
        Errno::ETIMEDOUT if what == CONNECTING => {
            "No monitor answers: check conf, 'mon host' and the network".to_owned()
        }
        _ => return OpenError::os(what, errno),
    };
    OpenError::os(what, errno).with_hint(hint).with_hint_everywhere()
}

/// Waits for an answer, with a limit in nanoseconds.
pub(super) async fn within<T>(
    event_loop: &EventLoop,
    limit_ns: u64,
    answer: oneshot::Receiver<T>,
) -> Option<Result<T, event_loop::LoopGone>> {
    let deadline = event_loop.sleep_until(event_loop.now_ns() + limit_ns);
    until(answer, deadline).await.ok()
}

/// Returns the connection of a configuration, or makes it. Blocks.
fn connect(
    library: &Arc<Library>,
    clusters: &Clusters,
    config: Config,
) -> Result<Arc<Cluster>, rbd::Error> {
    let place = lock(clusters).entry(config.clone()).or_default().clone();
    let mut place = lock(&place);
    if let Some(cluster) = place.upgrade() {
        return Ok(cluster);
    }
    let cluster = Arc::new(Cluster::connect(library, &config, DEFAULTS)?);
    *place = Arc::downgrade(&cluster);
    Ok(cluster)
}

fn name_of(options: &RbdOptions) -> ImageName {
    let RbdOptions { pool, namespace, image, snapshot, .. } = options.clone();
    ImageName { pool, namespace, image, snapshot }
}

/// Returns the image's name as Ceph's tools write it.
pub(super) fn shown(options: &RbdOptions) -> String {
    let RbdOptions { pool, namespace, image, snapshot, .. } = options;
    let mut shown = format!("{pool}/");
    if !namespace.is_empty() {
        shown += &format!("{namespace}/");
    }
    shown += image;
    if let Some(snapshot) = snapshot {
        shown += &format!("@{snapshot}");
    }
    shown
}

fn config(options: &RbdOptions, key: Option<Key>) -> Config {
    let RbdOptions { conf, user, auth_client_required, server, .. } = options;
    let mut set = vec![(ADMIN_SOCKET.0, ADMIN_SOCKET.1.to_owned())];
    if !auth_client_required.is_empty() {
        let words: Vec<_> = auth_client_required.iter().map(|mode| mode.word()).collect();
        set.push(("auth_client_required", words.join(";")));
    }
    if !server.is_empty() {
        let address = |(host, port): &(String, u16)| match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        let addresses: Vec<_> = server.iter().map(address).collect();
        set.push(("mon_host", addresses.join(";")));
    }
    Config { file: conf.clone(), user: user.clone(), key, options: set }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_beyond_its_time_says_what_is_not_done() {
        let options = RbdOptions { pool: "p".into(), image: "i".into(), ..RbdOptions::default() };
        let why = too_slow(&options, "created").to_string();
        let expected = "rbd image p/i: not created within 35 seconds; the library is still at it";
        assert!(why.starts_with(expected), "{why}");
    }
}
