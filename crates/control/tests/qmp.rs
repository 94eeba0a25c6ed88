//! QMP's stream and a client's conversation without a socket.

use std::time::{Duration, UNIX_EPOCH};

use control::qmp::events::BLOCK_EXPORT_DELETED;
use control::qmp::{
    Command, DeleteMode, Event, MAX_DEPTH, MAX_VALUE, Parser, QmpError, Session, Step,
};
use control::{Action, ObjectOptions, Value};
use proptest::prelude::*;
use serde_json::{Value as Json, json};

type Parsed = Vec<Result<Json, String>>;

/// Parses `input` in pieces that end at `cuts`.
fn parse_in_pieces(input: &[u8], cuts: &[usize]) -> Parsed {
    let mut parser = Parser::new();
    let mut out = Vec::new();
    let mut from = 0;
    for to in cuts.iter().copied().chain([input.len()]) {
        let to = to.clamp(from, input.len());
        let mut piece = &input[from..to];
        from = to;
        while let Some(parsed) = parser.next(&mut piece) {
            out.push(parsed);
        }
        assert!(piece.is_empty(), "{} bytes were left", piece.len());
    }
    out
}

fn parse(input: &str) -> Parsed {
    parse_in_pieces(input.as_bytes(), &[])
}

fn any_json() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i64>().prop_map(Json::from),
        any::<u64>().prop_map(Json::from),
        (-1e9..1e9).prop_map(Json::from),
        any::<String>().prop_map(Json::from),
    ];
    leaf.prop_recursive(5, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Json::from),
            prop::collection::btree_map(any::<String>(), inner, 0..6)
                .prop_map(|members| members.into_iter().collect()),
        ]
    })
}

/// Difficult text for parsers, in any order.
fn fragments() -> impl Strategy<Value = Vec<u8>> {
    let fragment = prop::sample::select(vec![
        &b"{"[..],
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b"\"",
        b"'",
        b"\\",
        b"\\u",
        b"d83d",
        b"\\ude00",
        b"a",
        b"true",
        b"nul",
        b"-",
        b"1.5e",
        b"01",
        b" ",
        b"\n",
        b"\t",
        b"\x00",
        b"\xff",
        b"\xc3",
        b"\"execute\"",
        b"{\"a\": 1}",
        b"%",
    ]);
    prop::collection::vec(fragment, 0..60).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn values_come_out_as_they_went_in(
        values in prop::collection::vec((any_json(), prop::sample::select(vec![" ", "\n", "\r\n\t "])), 1..5),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        let text: String = values.iter().map(|(value, space)| format!("{value}{space}")).collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len())).collect();
        cuts.sort_unstable();
        let expected: Parsed = values.into_iter().map(|(value, _)| Ok(value)).collect();
        prop_assert_eq!(parse_in_pieces(text.as_bytes(), &cuts), expected);
    }

    #[test]
    fn where_the_stream_is_cut_makes_no_difference(text in fragments()) {
        let whole = parse_in_pieces(&text, &[]);
        let bytes: Vec<usize> = (1..text.len()).collect();
        prop_assert_eq!(&parse_in_pieces(&text, &bytes), &whole);
        for cut in 0..text.len() {
            prop_assert_eq!(&parse_in_pieces(&text, &[cut]), &whole);
        }
    }

    /// After an error, a line end or a byte outside of UTF-8 resets the stream.
    #[test]
    fn a_client_can_begin_anew(text in fragments()) {
        let mut stream = text;
        stream.extend(b"\n\xff{\"fresh\": 1}");
        prop_assert_eq!(parse_in_pieces(&stream, &[]).pop(), Some(Ok(json!({"fresh": 1}))));
    }
}

/// Compared with qemu-storage-daemon 11.1.
#[test]
fn parse_errors_are_those_of_qsd() {
    for (text, expected) in [
        ("{\"a\":1,\"a\":2}", "1:12: JSON parse error, duplicate key"),
        ("{\"execute\" \"x\"}", "1:12: JSON parse error, expecting ':'"),
        ("\n\n}", "3:1: JSON parse error, expecting value"),
        ("frob ", "1:1: JSON parse error, invalid keyword 'frob'"),
        ("nulll ", "1:1: JSON parse error, invalid keyword 'nulll'"),
        ("[}", "1:2: JSON parse error, expecting value"),
        ("{]", "1:2: JSON parse error, expecting key"),
        ("{\"a\"}", "1:5: JSON parse error, expecting ':'"),
        ("{\"a\":}", "1:6: JSON parse error, expecting value"),
        ("{\"a\":1,}", "1:8: JSON parse error, expecting key"),
        ("{1:2}", "1:2: JSON parse error, expecting key"),
        ("[1 2]", "1:4: JSON parse error, expected ',' or ']'"),
        ("{\"a\":1 \"b\":2}", "1:8: JSON parse error, expected ',' or '}'"),
        ("[,]", "1:2: JSON parse error, expecting value"),
        ("%d", "1:1: JSON parse error, stray '%'"),
        ("[\"\\ud83d\"]", "1:2: JSON parse error, \\ud83d is not a valid Unicode character"),
        ("[\"\\q\"]", "1:2: JSON parse error, invalid escape sequence in string"),
    ] {
        assert_eq!(parse(text), [Err(expected.to_owned())], "{text}");
    }
    let broken = parse("{\"id\":\"a\tb\"}\n{\"id\": 1}");
    assert_eq!(
        broken,
        [
            Err("1:7: JSON parse error, stray '\"a\t'".into()),
            Err("1:12: JSON parse error, expecting value".into()),
            Ok(json!({"id": 1})),
        ]
    );
}

#[test]
fn qemus_additions_to_json() {
    assert_eq!(parse("{'it\\'s': \"'\"}"), [Ok(json!({"it's": "'"}))]);
    assert_eq!(parse("\"\\u00e9\\ud83d\\ude00\\/\""), [Ok(json!("é😀/"))]);
    assert_eq!(parse("18446744073709551615 "), [Ok(json!(u64::MAX))]);
    assert_eq!(
        parse("{\"a\":1}{\"a\":2}[]"),
        [Ok(json!({"a":1})), Ok(json!({"a":2})), Ok(json!([]))]
    );
}

#[test]
fn length_and_depth_are_bounded() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    assert!(parse(&nested(MAX_DEPTH))[0].is_ok());
    let deep = nested(1_000_000) + "\n{}";
    let expected = [Err("JSON nesting depth limit exceeded".to_owned()), Ok(json!({}))];
    assert_eq!(parse(&deep), expected);

    let text = |length: usize| format!("\"{}\"\n", "x".repeat(length));
    assert!(parse(&text(MAX_VALUE - 2))[0].is_ok());
    let expected = [Err("JSON token size limit exceeded".to_owned()), Ok(json!({}))];
    assert_eq!(parse(&(text(10 * MAX_VALUE) + "{}")), expected);
    let list = format!("[{}0]\n{{}}", "0,".repeat(MAX_VALUE));
    assert_eq!(parse(&list), expected);
    // White space between values does not count.
    let spaces = " ".repeat(2 * MAX_VALUE) + "{}" + &"\n".repeat(2 * MAX_VALUE) + "{}";
    assert_eq!(parse(&spaces), [Ok(json!({})), Ok(json!({}))]);
}

/// Sends a line. Returns the answer, or the parsed command.
fn send(session: &mut Session, line: &str) -> Result<Command, Json> {
    let mut input = line.as_bytes();
    match session.next(&mut input).expect("a whole line") {
        Step::Reply(reply) => {
            assert!(reply.is_ascii() && reply.ends_with("\r\n"), "{reply:?}");
            Err(serde_json::from_str(&reply).expect("JSON"))
        }
        Step::Run(_, command) => Ok(command),
        // This test adds no commands.
        Step::Call(_, command, _) => panic!("{}", command.name()),
    }
}

fn negotiated() -> Session {
    let mut session = Session::new(false);
    assert_eq!(send(&mut session, "{'execute':'qmp_capabilities'}"), Err(json!({"return": {}})));
    session
}

fn error(class: &str, desc: &str) -> Json {
    json!({"error": {"class": class, "desc": desc}})
}

/// Compared with qemu-storage-daemon 11.1.
#[test]
fn negotiation_comes_first_and_once() {
    let mut session = Session::new(false);
    let greeting: Json = serde_json::from_str(&session.greeting()).expect("JSON");
    assert_eq!(greeting["QMP"]["capabilities"], json!(["oob"]));
    let too_early = "Expecting capabilities negotiation with 'qmp_capabilities'";
    for command in ["query-version", "frob"] {
        let answer = send(&mut session, &format!("{{'execute':'{command}'}}"));
        assert_eq!(answer, Err(error("CommandNotFound", too_early)));
    }
    let enable = "{'execute':'qmp_capabilities','arguments':{'enable':['oob']},'id':1}";
    assert_eq!(send(&mut session, enable), Err(json!({"return": {}, "id": 1})));
    let again = "Capabilities negotiation is already complete, command ignored";
    assert_eq!(send(&mut session, enable).expect_err("no command")["error"]["desc"], again);
}

/// Compared with qemu-storage-daemon 11.1.
#[test]
fn malformed_requests() {
    let mut session = negotiated();
    for (line, desc) in [
        ("[]", "QMP input must be a JSON object"),
        ("{}", "QMP input lacks member 'execute'"),
        ("{'execute':1}", "QMP input member 'execute' must be a string"),
        ("{'execute':'quit','arguments':[]}", "QMP input member 'arguments' must be an object"),
        ("{'execute':'quit','frob':1}", "QMP input member 'frob' is unexpected"),
        ("{'exec-oob':'quit'}", "QMP input member 'exec-oob' is unexpected"),
        ("{'execute':'quit','arguments':{'frob':1}}", "Parameter 'frob' is unexpected"),
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
        assert_eq!(send(&mut session, line), Err(error("GenericError", desc)), "{line}");
    }
    let unknown = json!({
        "id": {"a": [1, null]},
        "error": {"class": "CommandNotFound", "desc": "The command frob has not been found"},
    });
    assert_eq!(send(&mut session, "{'execute':'frob','id':{'a':[1,null]}}"), Err(unknown));

    let mut session = Session::new(false);
    let enable = "{'execute':'qmp_capabilities','arguments':{'enable':['oob']}}";
    assert!(send(&mut session, enable).is_err());
    for (line, desc) in [
        ("{'exec-oob':'quit'}", "The command quit does not support OOB"),
        (
            "{'exec-oob':'quit','execute':'quit'}",
            "QMP input member 'execute' clashes with 'exec-oob'",
        ),
    ] {
        assert_eq!(send(&mut session, line), Err(error("GenericError", desc)), "{line}");
    }
}

#[test]
fn commands_are_typed() {
    let mut session = negotiated();
    let mut command = |text: &str| send(&mut session, text).expect(text);
    assert_eq!(command("{'execute':'quit'}"), Command::Quit);
    assert_eq!(
        command("{'execute':'block-export-del','arguments':{'id':'e'}}"),
        Command::BlockExportDel { id: "e".into(), mode: DeleteMode::Safe }
    );
    let set = "{'execute':'qom-set','arguments':{'path':'t','property':'p','value':[1]}}";
    let value = Value::List(vec![Value::Integer(1)]);
    let (path, property) = ("t".into(), "p".into());
    assert_eq!(command(set), Command::QomSet { path, property, value });
    let add =
        "{'execute':'object-add','arguments':{'qom-type':'iothread','id':'t','poll-max-ns':0}}";
    let Command::Add(step) = command(add) else { panic!("no addition") };
    assert_eq!(step.origin, r#"--object {"qom-type":"iothread","id":"t","poll-max-ns":0}"#);
    match step.action {
        Action::Object(ObjectOptions::Iothread(iothread)) => {
            assert_eq!(iothread.poll_max_ns, Some(0))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn answers_and_events() {
    let mut session = Session::new(false);
    let at = UNIX_EPOCH + Duration::from_micros(1_000_007);
    let event = Event { row: &BLOCK_EXPORT_DELETED, data: json!({"id": "é"}), at };
    assert_eq!(session.event(&event), None, "before the negotiation");
    send(&mut session, "{'execute':'qmp_capabilities'}").expect_err("no command");
    let expected = "{\"timestamp\": {\"seconds\": 1, \"microseconds\": 7}, \"event\": \
                    \"BLOCK_EXPORT_DELETED\", \"data\": {\"id\": \"\\u00E9\"}}\r\n";
    assert_eq!(session.event(&event).as_deref(), Some(expected));

    let mut input = &b"{'execute':'quit','id':'x'}"[..];
    let Some(Step::Run(ticket, _)) = session.next(&mut input) else { panic!() };
    let failed = session.answer(ticket, Err(QmpError::device_not_found("/x")));
    let expected = "{\"id\": \"x\", \"error\": {\"class\": \"DeviceNotFound\", \
                    \"desc\": \"Device '/x' not found\"}}\r\n";
    assert_eq!(failed, expected);

    let mut pretty = Session::new(true);
    let mut input = &b"{'execute':'qmp_capabilities'}"[..];
    let Some(Step::Reply(reply)) = pretty.next(&mut input) else { panic!() };
    assert_eq!(reply, "{\r\n    \"return\": {\r\n    }\r\n}\r\n");
}

/// The answer of a command without arguments that the session handles itself.
fn ask(session: &mut Session, command: &str) -> Json {
    let answer = send(session, &format!("{{'execute':'{command}'}}"));
    answer.expect_err("an answer")["return"].take()
}

#[test]
fn the_schema_is_whole() {
    let mut session = negotiated();
    let schema = ask(&mut session, "query-qmp-schema");
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

    // References to types are members of these names.
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

    let commands = ask(&mut session, "query-commands");
    let commands = commands.as_array().expect("a list").iter();
    let commands: Vec<&str> = commands.map(|entry| entry["name"].as_str().expect("one")).collect();
    assert_eq!(names("command"), commands);
    assert!(names("event").contains(&BLOCK_EXPORT_DELETED.name));
}
