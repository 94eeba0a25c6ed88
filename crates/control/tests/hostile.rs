//! Any text at all: never a panic, and what can be written can be read back.

use control::keyval::{format, parse};
use control::{Object, Value, parse_args};
use proptest::prelude::*;

fn key() -> impl Strategy<Value = String> {
    "[a-z][a-z0-9_-]{0,5}"
}

/// Values that `key=value` can say.
fn value() -> impl Strategy<Value = Value> {
    let text = "[ -~äß,=.]{0,8}".prop_map(Value::Text);
    text.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..4).prop_map(Value::List),
            object(inner).prop_map(Value::Object),
        ]
    })
}

/// Members with names that differ.
fn object(value: impl Strategy<Value = Value>) -> impl Strategy<Value = Object> {
    prop::collection::vec((key(), value), 1..4).prop_map(|mut members| {
        members.sort_by(|one, other| one.0.cmp(&other.0));
        members.dedup_by(|one, other| one.0 == other.0);
        members
    })
}

/// Deep text is refused before it has taken much stack, and what is just deep enough takes little.
#[test]
fn nesting_does_not_choose_the_depth_of_the_stack() {
    const MOST: usize = 512;
    let read = |option: String| {
        let words = ["ringmill", "storage-daemon", "--blockdev", &option];
        parse_args(words.into_iter().map(Into::into)).map(drop).map_err(|error| error.to_string())
    };
    let lists = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    let json = move |depth: usize| format!("{{'driver': 'null-co', 'x': {}}}", lists(depth - 1));
    let key = move |depth: usize| format!("driver=null-co,{}x=1", "x.".repeat(depth - 1));
    let check = move || {
        for text in [json(MOST), key(MOST)] {
            let why = read(text).unwrap_err();
            assert!(
                why.contains("'x'") || why.contains("x.x") || why.contains("unexpected"),
                "{why}"
            );
        }
        for depth in [MOST + 1, 1_000_000] {
            let why = read(json(depth)).unwrap_err();
            assert!(why.contains("more than 512 nested levels"), "{why}");
        }
        for depth in [MOST + 1, 100_000] {
            let why = read(key(depth)).unwrap_err();
            assert!(why.contains("is nested too deeply"), "{}", why.len());
        }
        // Brackets within text are none.
        let text = format!("{{'driver': '{}\\\"[[', 'node-name': 'n'}}", "[{".repeat(1000));
        let why = read(text).unwrap_err();
        assert!(!why.contains("nested"), "{why}");
    };
    let thread = std::thread::Builder::new().stack_size(2 << 20);
    thread.spawn(check).expect("a thread").join().expect("it has room");
}

/// Words that options are made of, and others.
fn word() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec![
            "driver",
            "null-co",
            "raw",
            "file",
            "filename",
            "node-name",
            "n",
            "cache",
            "direct",
            "on",
            "size",
            "1G",
            "iothread",
            "id",
            "io0",
            "poll-max-ns",
            "poll-policy",
            "stepped",
            "vhost-user-blk",
            "addr",
            "type",
            "unix",
            "fd",
            "path",
            "str",
            "socket",
            "host",
            "port",
            "server",
            "nowait",
            "chardev",
            "pretty",
            "num-queues",
            "help",
            "0",
            "1",
            "-1",
            "{",
            "}",
            "\"",
            ":",
            "[",
            "]",
            "'",
            "\\",
            "null",
            "0x",
            "9223372036854775808",
        ])
        .prop_map(str::to_owned),
        any::<String>(),
    ]
}

fn option_text() -> impl Strategy<Value = String> {
    let separator = prop::sample::select(vec![",", "=", ".", ",,", ""]);
    prop::collection::vec((word(), separator), 0..16).prop_map(|words| {
        words.into_iter().flat_map(|(word, separator)| [word, separator.to_owned()]).collect()
    })
}

fn argument() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec![
            "--blockdev",
            "--chardev",
            "--export",
            "--monitor",
            "--object",
            "--pidfile",
            "--daemonize",
            "--b",
            "-h",
            "-V",
            "--",
            "-",
            "serve",
            "storage-daemon",
            "probe",
            "--size",
            "--queues=",
            "--trace",
            "-T",
            "--read-only",
        ])
        .prop_map(str::to_owned),
        option_text(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn keyval_reads_what_it_writes(members in object(value())) {
        let text = format(&members).expect("these values can be written");
        let parsed = parse(&text, None).expect("what was written can be read");
        prop_assert_eq!(parsed.object, members, "{}", text);
        prop_assert!(!parsed.help);
    }

    #[test]
    fn keyval_never_panics(text in option_text()) {
        let _ = parse(&text, Some("driver"));
        let _ = parse(&text, None);
    }

    #[test]
    fn what_keyval_reads_it_can_write(text in option_text()) {
        if let Ok(parsed) = parse(&text, Some("driver")) {
            let written = format(&parsed.object).expect("what was read can be written");
            let again = parse(&written, None).expect("and read again");
            prop_assert_eq!(again.object, parsed.object);
        }
    }

    #[test]
    fn command_lines_never_panic(
        name in prop::sample::select(vec!["ringmill", "qemu-storage-daemon", ""]),
        arguments in prop::collection::vec(argument(), 0..6),
    ) {
        let _ = parse_args([name.to_owned()].into_iter().chain(arguments).map(Into::into));
    }

    #[test]
    fn options_never_panic(
        option in prop::sample::select(vec![
            "--blockdev", "--chardev", "--export", "--monitor", "--object", "--trace",
        ]),
        text in option_text(),
    ) {
        let argv = ["qemu-storage-daemon".to_owned(), option.to_owned(), text];
        let _ = parse_args(argv.map(Into::into));
    }
}
