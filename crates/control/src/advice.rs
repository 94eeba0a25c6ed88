//! Translates advice in errors into the options of the command that was given.

/// Advice in errors of nodes and exports, in options of `storage-daemon` and of `serve`. A longer text comes
/// before a text that it starts with.
const OF_SERVE: &[(&str, &str)] = &[
    ("read-only=on or auto-read-only=on asks for less", "--read-only asks for less"),
    ("read-only=on", "--read-only"),
    ("cache.direct=off", "--cache writeback"),
    ("locking=off", "--locking off"),
    ("aio=io_uring", "--aio io_uring"),
    ("aio=threads", "--aio threads"),
    ("aio=native", "--aio native"),
    ("driver=raw", "--format raw"),
    (
        "encrypt.format=luks,encrypt.key-secret=… names the secret with its password",
        "serve has no option for its password: ringmill storage-daemon serves it",
    ),
];

/// Returns advice with options of `storage-daemon` replaced by those of `serve`.
pub fn advice_for_serve(advice: &str) -> String {
    OF_SERVE.iter().fold(advice.to_owned(), |text, (option, own)| text.replace(option, own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_the_options_of_serve() {
        for (advice, own) in [
            (
                "It is opened for writing: read-only=on or auto-read-only=on asks for less",
                "It is opened for writing: --read-only asks for less",
            ),
            (
                "Its file system has no direct I/O: use cache.direct=off",
                "Its file system has no direct I/O: use --cache writeback",
            ),
            ("use aio=io_uring or aio=threads", "use --aio io_uring or --aio threads"),
            (
                "encrypt.format=luks,encrypt.key-secret=… names the secret with its password",
                "serve has no option for its password: ringmill storage-daemon serves it",
            ),
        ] {
            assert_eq!(advice_for_serve(advice), own);
        }
    }
}
