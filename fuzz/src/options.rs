//! A command line with arbitrary words and options with arbitrary values: `key=value`, JSON, dotted keys.
//!
//! Checked: errors are short; a value of `key=value` text can be written as such text again;
//! completions begin with the given text; and the command line for the process of an upgrade gives the same
//! configuration.

use std::ffi::OsString;

use control::{Action, Command, ImageKind, Inventory, ServeFormat, keyval, parse_args};

/// The program of the command line, by the first letter of the first line.
const PROGRAMS: &[(char, &[&str])] = &[
    ('R', &["ringmill"]),
    ('D', &["ringmill", "storage-daemon"]),
    ('S', &["ringmill", "serve"]),
    ('U', &["ringmill", "upgrade"]),
    ('C', &["ringmill", "ctl"]),
    ('T', &["ringmill", "top"]),
    ('P', &["ringmill", "probe"]),
];

/// The option, by the first letter of a line. Options of `serve` and others that are missing here are words.
const OPTIONS: &[(char, &str)] = &[
    ('a', "--aio"),
    ('b', "--blockdev"),
    ('c', "--chardev"),
    ('e', "--export"),
    ('h', "--cache"),
    ('i', "--iothreads"),
    ('k', "--socket"),
    ('m', "--monitor"),
    ('n', "--nbd-server"),
    ('o', "--object"),
    ('p', "--pidfile"),
    ('q', "--queues"),
    ('s', "--sandbox"),
    ('t', "--trace"),
    ('u', "--user"),
    ('x', "--metrics"),
    ('y', "--poll-max-ns"),
    ('z', "--size"),
];

/// Most options of one command line.
const MOST: usize = 16;

/// Runs one input. Each line has a letter for an option and then its value, or a blank and a word. The
/// first line may name the program.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut arguments = Vec::new();
    for line in text.split('\n').take(MOST) {
        let Some(letter) = line.chars().next() else { continue };
        let value = &line[letter.len_utf8()..];
        if arguments.is_empty() {
            let found = PROGRAMS.iter().find(|(known, _)| *known == letter);
            let words = found.map_or(&["qemu-storage-daemon"][..], |(_, words)| words);
            arguments.extend(words.iter().map(|&word| word.to_owned()));
            if found.is_some() {
                arguments.extend((!value.is_empty()).then(|| value.to_owned()));
                continue;
            }
        }
        match OPTIONS.iter().find(|(known, _)| *known == letter) {
            Some((_, option)) => {
                written_again(value);
                arguments.extend([(*option).to_owned(), value.to_owned()]);
            }
            None if letter == ' ' => arguments.push(value.to_owned()),
            None => continue,
        }
        complete(&arguments);
    }
    let length: usize = arguments.iter().map(String::len).sum();
    let said = |error: String| {
        // The value appears in the option's prefix and in the error; then come the known words.
        assert!(error.len() <= 4096 + 8 * length, "{} bytes for {length}", error.len());
    };
    match parse_args(arguments.iter().map(OsString::from)) {
        Ok(Command::StorageDaemon(options)) => handed_over(&options),
        Ok(Command::Serve(options)) => {
            for kind in [ImageKind::File, ImageKind::BlockDevice] {
                for format in [ServeFormat::Raw, ServeFormat::ProbedRaw, ServeFormat::Qcow2] {
                    let steps = options.steps(kind, format);
                    Inventory::check(&steps).expect("what serve makes fits together");
                }
            }
        }
        Ok(Command::Ctl(options)) => {
            if let control::CtlRequest::Execute(command) = options.request {
                // Some errors list all commands or members.
                let _ = command.check();
            }
        }
        Ok(command) => drop(command),
        Err(error) => said(error.to_string()),
    }
}

/// Checks that the command line for another process makes the same configuration.
///
/// Its order: chardevs, monitors and metrics, which refer to nothing else; objects and the NBD server; nodes;
/// exports.
fn handed_over(options: &control::StorageDaemonOptions) {
    let mut inventory = Inventory::default();
    for step in &options.steps {
        inventory = inventory.with(step).expect("the command line was checked");
    }
    let nodes = || {
        options.steps.iter().filter_map(|step| match &step.action {
            Action::Blockdev(node) => Some(node),
            _ => None,
        })
    };
    // As the registry does with nodes that have not changed.
    let describe = |names: Vec<&str>| {
        let named = |name| nodes().find(|node| node.node_name.as_deref() == Some(name)).cloned();
        names.into_iter().filter_map(named).collect()
    };
    // Text cannot express every file name.
    let Ok(arguments) = inventory.command_line(describe) else { return };
    let words = std::iter::once("ringmill").chain(arguments.iter().map(String::as_str));
    let again = match parse_args(words.map(OsString::from)) {
        Ok(Command::StorageDaemon(again)) => again,
        other => panic!("{arguments:?}: {other:?}"),
    };
    let place = |action: &Action| match action {
        Action::Chardev(_) | Action::Monitor(_) | Action::Metrics(_) => 0,
        Action::Object(_) | Action::NbdServer(_) => 1,
        Action::Blockdev(_) => 2,
        Action::Export(_) => 3,
    };
    let mut expected: Vec<_> = options.steps.iter().map(|step| &step.action).collect();
    expected.sort_by_key(|action| place(action));
    assert!(again.steps.iter().map(|step| &step.action).eq(expected), "{arguments:?}");
}

fn written_again(text: &str) {
    for implied in [None, Some("driver")] {
        let Ok(parsed) = keyval::parse(text, implied) else { continue };
        let Ok(written) = keyval::format(&parsed.object) else { continue };
        let again = keyval::parse(&written, None).expect("what was written is well formed");
        assert_eq!(again.object, parsed.object, "{written}");
    }
}

fn complete(arguments: &[String]) {
    let (program, rest) = arguments.split_first().expect("the program's name");
    let words = [program.as_str(), "--complete", program].into_iter().map(OsString::from);
    let words = words.chain(rest.iter().map(OsString::from));
    let Ok(Command::Print(found)) = parse_args(words) else {
        panic!("--complete is refused");
    };
    let last = arguments.last().map_or("", String::as_str);
    for line in found.lines().filter(|_| !last.contains(['\t', '\r'])) {
        assert!(line.starts_with(last) || line.starts_with(':'), "{line:?} after {last:?}");
    }
}
