//! Tests of the commands in sessions, in the schema, and in `ctl`.

use control::qmp::events::BLOCK_EXPORT_DELETED;
use control::qmp::{Received, Session};
use control::{CtlCommand, CtlRequest, parse_args};
use serde_json::{Map, Value as Json, json};

use super::*;

#[test]
fn examples_are_right() {
    for command in all() {
        let arguments: Map<String, Json> = match command.example() {
            "" => Map::new(),
            example => serde_json::from_str(example)
                .unwrap_or_else(|error| panic!("{}: {error}", command.name())),
        };
        let arguments = arguments.into_iter().map(|(name, value)| (name, value.into()));
        if let Err(error) = command.check(arguments.collect()) {
            panic!("{}: {error}", command.name());
        }
    }
}

/// Returns the answer that a client gets without the daemon. `None`: the daemon executes the
/// command.
fn answer(line: &str) -> Option<Result<Json, String>> {
    register();
    let mut session = Session::new(false);
    let mut negotiation = &b"{'execute':'qmp_capabilities'}"[..];
    assert!(matches!(session.next(&mut negotiation), Some(Received::Reply(_))));
    match session.next(&mut line.as_bytes()) {
        Some(Received::Call(_, command, arguments)) => match read(command.name(), arguments) {
            Ok(Accepted::Answer(answer)) => Some(Ok(answer)),
            Ok(Accepted::Call(_)) => None,
            Err(error) => Some(Err(error.desc)),
        },
        Some(Received::Reply(_)) | None => panic!("{line} is no command"),
    }
}

/// Each text was compared with that of qemu-storage-daemon 11.1.
#[test]
fn wrong_arguments_are_told_as_qsd_tells_them() {
    for (line, desc) in [
        ("{'execute':'quit','arguments':{'frob':1}}", "Parameter 'frob' is unexpected"),
        ("{'execute':'query-version','arguments':{'frob':1}}", "Parameter 'frob' is unexpected"),
        ("{'execute':'object-del'}", "Parameter 'id' is missing"),
        (
            "{'execute':'object-del','arguments':{'id':1}}",
            "Invalid parameter type for 'id', expected: string",
        ),
        (
            "{'execute':'block-export-del','arguments':{'id':'e','mode':'frob'}}",
            "Parameter 'mode' does not accept value 'frob'",
        ),
    ] {
        assert_eq!(answer(line), Some(Err(desc.to_owned())), "{line}");
    }
    assert_eq!(answer("{'execute':'quit'}"), None);
}

/// Returns the answer to a command that needs neither arguments nor the daemon.
fn ask(command: &str) -> Json {
    let answer = answer(&format!("{{'execute':'{command}'}}"));
    answer.expect("an answer").expect("no error")
}

#[test]
fn the_schema_is_whole() {
    let schema = ask("query-qmp-schema");
    let entries = schema.as_array().expect("a list");
    let names = |meta: &str| -> Vec<&str> {
        let named = entries.iter().filter(|entry| entry["meta-type"] == meta);
        named.map(|entry| entry["name"].as_str().expect("a name")).collect()
    };
    let types = ["builtin", "enum", "array", "object", "alternate"];
    let mut defined: Vec<&str> = types.iter().flat_map(|meta| names(meta)).collect();
    let types = defined.len();
    assert_eq!(types + names("command").len() + names("event").len(), entries.len());
    defined.sort_unstable();
    defined.dedup();
    assert_eq!(defined.len(), types, "defined twice");

    // Every reference to a type is a member with one of these names.
    let mut referred = Vec::new();
    let mut left: Vec<&Json> = entries.iter().collect();
    while let Some(value) = left.pop() {
        match value {
            Json::Array(values) => left.extend(values),
            Json::Object(members) => {
                for (name, value) in members {
                    match (name.as_str(), value) {
                        ("type" | "arg-type" | "ret-type" | "element-type", Json::String(name)) => {
                            referred.push(name.as_str());
                        }
                        (_, value) => left.push(value),
                    }
                }
            }
            _ => {}
        }
    }
    referred.sort_unstable();
    referred.dedup();
    assert_eq!(referred, defined, "referred to, and defined");

    let commands = ask("query-commands");
    let commands = commands.as_array().expect("a list").iter();
    let commands: Vec<&str> = commands.map(|entry| entry["name"].as_str().expect("one")).collect();
    assert_eq!(names("command"), commands);
    assert!(names("event").contains(&BLOCK_EXPORT_DELETED.name));
}

#[test]
fn examples_of_ctl_are_right() {
    register();
    let reference = parse_args(["ringmill", "--generate", "reference"].map(Into::into));
    let Ok(control::Command::Print(reference)) = reference else { panic!("no reference") };
    let examples =
        reference.lines().filter(|line| line.starts_with("ringmill ctl ") && !line.contains('<'));
    for example in examples.clone() {
        let parsed = parse_args(example.split_whitespace().map(Into::into));
        let Ok(control::Command::Ctl(options)) = parsed else { panic!("{example}") };
        if let CtlRequest::Execute(command) = options.request {
            assert_eq!(command.check(), Ok(()), "{example}");
        }
    }
    assert!(examples.count() > 3);
}

/// Returns the arguments that `ctl` sends for these words, its help text, or its error.
fn ctl(words: &[&str]) -> Json {
    register();
    let line = ["ringmill", "ctl", "m.sock"].iter().chain(words);
    match parse_args(line.map(|&word| word.into())) {
        Ok(control::Command::Ctl(options)) => match options.request {
            CtlRequest::Execute(command) => command.arguments.into(),
            CtlRequest::Commands | CtlRequest::Events => panic!("{words:?} is no command"),
        },
        Ok(control::Command::Print(text)) => text.into(),
        Ok(other) => panic!("{words:?}: {other:?}"),
        Err(error) => error.error.to_string().into(),
    }
}

#[test]
fn words_of_ctl_become_what_the_command_takes() {
    let raw = ["blockdev-add", "raw", "node-name=1", "read-only=on", "size=0x100000,offset=512"];
    let file = ["file.driver=file", "file.filename=a,,b", "file.cache.direct=yes"];
    assert_eq!(
        ctl(&[&raw[..], &file].concat()),
        json!({
            "driver": "raw", "node-name": "1", "read-only": true, "size": 1 << 20, "offset": 512,
            "file": {"driver": "file", "filename": "a,b", "cache": {"direct": true}},
        })
    );
    assert_eq!(
        ctl(&["block-export-add", "vhost-user-blk", "id=e", "iothread.0=a", "num-queues=2"]),
        json!({"type": "vhost-user-blk", "id": "e", "iothread": ["a"], "num-queues": 2})
    );
    // An argument of any type becomes a number if its text is a number.
    let set = ["qom-set", "path=io0", "property=poll-max-ns"];
    for (value, json) in [("value=5", json!(5)), ("value=on", json!("on"))] {
        let expected = json!({"path": "io0", "property": "poll-max-ns", "value": json});
        assert_eq!(ctl(&[&set[..], &[value]].concat()), expected);
    }
    // A value of another type stays text, for the daemon to refuse.
    let wrong = json!({"qom-type": "iothread", "id": "x", "poll-max-ns": "many"});
    assert_eq!(ctl(&["object-add", "iothread", "id=x", "poll-max-ns=many"]), wrong);
    // Values may be JSON, with commas.
    let reopen = r#"options=[{"driver":"file","node-name":"a","filename":"[x"}]"#;
    let expected = json!({"options": [{"driver": "file", "node-name": "a", "filename": "[x"}]});
    assert_eq!(ctl(&["blockdev-reopen", reopen]), expected);
    let file = r#"file={"driver":"null-co","size":512}"#;
    assert_eq!(
        ctl(&["blockdev-add", "raw", "node-name=r", file]),
        json!({"driver": "raw", "node-name": "r", "file": {"driver": "null-co", "size": 512}})
    );
    let text = json!({"driver": "file", "filename": "[x"});
    assert_eq!(ctl(&["blockdev-add", "file", "filename=[x"]), text);
    let Json::String(wrong) = ctl(&["blockdev-add", "raw", "file={driver:file}"]) else { panic!() };
    assert!(wrong.contains("file: not valid JSON"), "{wrong}");
    let unknown = ["of-another-daemon", "a=1", "b.c=true", "d.0=x", r#"{"e": null}"#];
    let expected = json!({"e": null, "a": 1, "b": {"c": true}, "d": ["x"]});
    assert_eq!(ctl(&unknown), expected);
    assert_eq!(
        ctl(&["blockdev-del", "disk0"]),
        "blockdev-del: Expected '=' after parameter 'disk0'\n\
         'ringmill ctl <socket> blockdev-del help' lists its arguments."
    );
}

#[test]
fn ctl_names_the_number_for_a_size_with_a_suffix() {
    register();
    let hint = |name: &str, arguments: Json| {
        let Json::Object(arguments) = arguments else { panic!("no object") };
        let refused = CtlCommand { name: name.into(), arguments }.check().unwrap_err();
        refused.hint.unwrap_or_default()
    };
    let bytes = "QMP takes numbers, sizes in bytes: size=9437184 is 9M.";
    assert_eq!(hint("block_resize", json!({"node-name": "n", "size": "9M"})), bytes);
    let file = json!({"driver": "null-co", "size": "1.5k"});
    let raw = json!({"driver": "raw", "node-name": "n", "file": file});
    assert!(hint("blockdev-add", raw).ends_with(" file.size=1536 is 1.5k."));
    let unknown = hint("block_resize", json!({"node-name": "n", "size": 512, "more": "9M"}));
    assert_eq!(unknown, "Known parameters of block_resize: node-name, size");
}

#[test]
fn ctl_takes_sizes_with_suffixes() {
    register();
    let resize = ["block_resize", "node-name=n", "size=2G"];
    assert_eq!(ctl(&resize), json!({"node-name": "n", "size": 2u64 << 30}));
    let node = ["blockdev-add", "null-co", "node-name=n", "size=1.5k"];
    assert_eq!(ctl(&node)["size"], 1536);
    let create = ["blockdev-create", "job-id=j", "options.driver=file", "options.size=1G"];
    assert_eq!(ctl(&create)["options"]["size"], 1 << 30);
    // Neither a size nor a number that fits.
    let wrong = ["block_resize", "node-name=n", "size=16E"];
    assert_eq!(ctl(&wrong)["size"], "16E");
}

#[test]
fn help_of_ctl_lists_arguments() {
    let Json::String(text) = ctl(&["blockdev-add", "help"]) else { panic!("no text") };
    assert!(text.starts_with("blockdev-add: open a block node"), "{text}");
    assert!(text.contains("\nBlock drivers:\n") && text.contains("host_device"), "{text}");
    assert!(text.ends_with("blockdev-add <driver> help' lists the options of one."), "{text}");
    for (command, part) in [
        (&["blockdev-del", "help"][..], "node-name=<node-name>"),
        (&["blockdev-add", "raw", "help"], "\nraw options:\n"),
        (&["block-export-add", "help"], "\nExport types:\n"),
        (&["object-add", "help"], "\nList of user creatable objects:\n"),
        (&["query-version", "help"], "\nThe command has no arguments."),
        (&["frob", "help"], "frob: ringmill has no command of this name"),
    ] {
        let Json::String(text) = ctl(command) else { panic!("no text") };
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn each_command_has_help_for_each_argument() {
    for command in all() {
        let Json::String(text) = ctl(&[command.name(), "help"]) else { panic!("no text") };
        // A list of words has no spaces, so the list stays on one line.
        let fits = |line: &str| line.chars().count() <= 80 || !line.trim().contains(' ');
        assert!(text.lines().all(fits), "{text}");
        let short = |line: &&str| line.trim_end().ends_with('=') || line.len() < 12;
        let bare = text.lines().filter(|line| line.starts_with("  ")).find(short);
        assert_eq!(bare, None, "{text}");
    }
}
