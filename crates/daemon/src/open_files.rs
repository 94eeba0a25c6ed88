//! The limit of open files: each export needs its image, its socket, a connection, and two descriptors per
//! queue, and a hundred exports exceed the usual soft limit of 1024.

use std::error::Error;
use std::io;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the soft limit to the hard one.
///
/// The soft limit is that low for select(2), which this program does not use.
pub fn raise_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| match soft < hard {
        true => setrlimit(Resource::RLIMIT_NOFILE, hard, hard),
        false => Ok(()),
    });
    if let Err(errno) = raised {
        log::warn!("the limit of open files stays as it is: setrlimit failed: {}", errno.desc());
    }
}

/// The number of connections that a server may have at a time, for a configured maximum (0: unlimited). Each
/// needs a descriptor. Half of the descriptors stay available for front ends and images.
pub(super) fn connections(wanted: u32) -> u32 {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    let most = u32::try_from(files / 2).unwrap_or(u32::MAX).max(1);
    if wanted > most {
        log::warn!(
            "NBD server: max-connections={wanted}, but half of the {files} files that the daemon may \
             have open (RLIMIT_NOFILE) is the most: {most}"
        );
    }
    if wanted == 0 { most } else { wanted.min(most) }
}

/// Advice for an error that is caused by the limit.
pub(super) fn advice(error: &(dyn Error + 'static)) -> Option<String> {
    let mut causes = std::iter::successors(Some(error), |&error| error.source());
    let is_limit = |cause: &(dyn Error + 'static)| match cause.downcast_ref::<io::Error>() {
        Some(error) => error.raw_os_error() == Some(Errno::EMFILE as i32),
        None => cause.downcast_ref::<Errno>() == Some(&Errno::EMFILE),
    };
    causes.any(is_limit).then(|| {
        let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        format!(
            "The daemon may have {limit} files open (RLIMIT_NOFILE). An export with a front end takes \
             about 4, and 2 more per queue: raise the hard limit with LimitNOFILE= (systemd) or \
             'ulimit -Hn'."
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_the_limit_get_advice() {
        let error = |errno: Errno| exports::vhost_user::ExportError::Listen {
            socket: "s".into(),
            call: "socket",
            error: errno.into(),
        };
        let text = advice(&error(Errno::EMFILE)).unwrap();
        assert!(text.contains("RLIMIT_NOFILE"), "{text}");
        assert_eq!(advice(&error(Errno::ENFILE)), None);
    }
}
