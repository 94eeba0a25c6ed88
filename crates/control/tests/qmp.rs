//! QMP's stream and a client's conversation, without a socket.

use std::sync::Once;
use std::time::{Duration, UNIX_EPOCH};

use control::qmp::events::BLOCK_EXPORT_DELETED;
use control::qmp::{
    Event, MAX_DEPTH, MAX_VALUE, Parser, QmpCommand, QmpError, Received, Returns, Session, add,
};
use control::{Object, OptionError};
use options::shape::Shape;
use proptest::prelude::*;
use serde_json::{Value as Json, json};

type Parsed = Vec<Result<Json, String>>;

/// Returns the result of parsing `input` when it arrives in pieces that end at `cuts`.
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

/// Text of the kind that parsers stumble over, in any order.
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

    /// What went wrong before, a line end and a byte that is in no text begin anew.
    #[test]
    fn a_client_can_begin_anew(text in fragments()) {
        let mut stream = text;
        stream.extend(b"\n\xff{\"fresh\": 1}");
        prop_assert_eq!(parse_in_pieces(&stream, &[]).pop(), Some(Ok(json!({"fresh": 1}))));
    }
}

/// Each was compared with qemu-storage-daemon 11.1.
#[test]
fn what_does_not_parse_is_told_as_qsd_tells_it() {
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
    // Not what is between values.
    let spaces = " ".repeat(2 * MAX_VALUE) + "{}" + &"\n".repeat(2 * MAX_VALUE) + "{}";
    assert_eq!(parse(&spaces), [Ok(json!({})), Ok(json!({}))]);
}

/// The only command of this program.
struct Quit;

impl QmpCommand for Quit {
    fn name(&self) -> &'static str {
        "quit"
    }

    fn help(&self) -> &'static str {
        "end the program"
    }

    fn example(&self) -> &'static str {
        ""
    }

    fn arguments(&self) -> Shape {
        Shape::Object(Vec::new())
    }

    fn option(&self) -> &'static str {
        ""
    }

    fn returns(&self) -> &Returns {
        &Returns::Nothing
    }

    fn check(&self, _: Object) -> Result<(), OptionError> {
        Ok(())
    }
}

fn session() -> Session {
    static ADDED: Once = Once::new();
    ADDED.call_once(|| add(vec![&Quit]).expect("a name that is free"));
    Session::new(false)
}

/// Sends a line. Returns the name of the command, or the answer of the session as an error.
fn send(session: &mut Session, line: &str) -> Result<&'static str, Json> {
    let mut input = line.as_bytes();
    match session.next(&mut input).expect("a whole line") {
        Received::Reply(reply) => {
            assert!(reply.is_ascii() && reply.ends_with("\r\n"), "{reply:?}");
            Err(serde_json::from_str(&reply).expect("JSON"))
        }
        Received::Call(_, command, _) => Ok(command.name()),
    }
}

fn negotiated() -> Session {
    let mut session = session();
    assert_eq!(send(&mut session, "{'execute':'qmp_capabilities'}"), Err(json!({"return": {}})));
    session
}

fn error(class: &str, desc: &str) -> Json {
    json!({"error": {"class": class, "desc": desc}})
}

/// Each was compared with qemu-storage-daemon 11.1.
#[test]
fn negotiation_comes_first_and_once() {
    let mut session = session();
    let greeting: Json = serde_json::from_str(&session.greeting()).expect("JSON");
    assert_eq!(greeting["QMP"]["capabilities"], json!(["oob"]));
    let too_early = "Expecting capabilities negotiation with 'qmp_capabilities'";
    for command in ["quit", "frob"] {
        let answer = send(&mut session, &format!("{{'execute':'{command}'}}"));
        assert_eq!(answer, Err(error("CommandNotFound", too_early)));
    }
    let enable = "{'execute':'qmp_capabilities','arguments':{'enable':['oob']},'id':1}";
    assert_eq!(send(&mut session, enable), Err(json!({"return": {}, "id": 1})));
    let again = "Capabilities negotiation is already complete, command ignored";
    assert_eq!(send(&mut session, enable).expect_err("no command")["error"]["desc"], again);
}

/// Each was compared with qemu-storage-daemon 11.1.
#[test]
fn requests_that_are_none() {
    let mut session = negotiated();
    for (line, desc) in [
        ("[]", "QMP input must be a JSON object"),
        ("{}", "QMP input lacks member 'execute'"),
        ("{'execute':1}", "QMP input member 'execute' must be a string"),
        ("{'execute':'quit','arguments':[]}", "QMP input member 'arguments' must be an object"),
        ("{'execute':'quit','frob':1}", "QMP input member 'frob' is unexpected"),
        ("{'exec-oob':'quit'}", "QMP input member 'exec-oob' is unexpected"),
    ] {
        assert_eq!(send(&mut session, line), Err(error("GenericError", desc)), "{line}");
    }
    let unknown = json!({
        "id": {"a": [1, null]},
        "error": {"class": "CommandNotFound", "desc": "The command frob has not been found"},
    });
    assert_eq!(send(&mut session, "{'execute':'frob','id':{'a':[1,null]}}"), Err(unknown));

    assert_eq!(send(&mut session, "{'execute':'quit'}"), Ok("quit"));

    let mut session = self::session();
    for (arguments, desc) in [
        ("{'enable':['frob']}", "Parameter 'enable' does not accept value 'frob'"),
        ("{'enable':1}", "Invalid parameter type for 'enable', expected: array"),
        ("{'frob':1}", "Parameter 'frob' is unexpected"),
    ] {
        let line = format!("{{'execute':'qmp_capabilities','arguments':{arguments}}}");
        assert_eq!(send(&mut session, &line), Err(error("GenericError", desc)), "{line}");
        assert!(!session.has_negotiated());
    }
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
fn answers_and_events() {
    let mut session = session();
    let at = UNIX_EPOCH + Duration::from_micros(1_000_007);
    let event = Event { row: &BLOCK_EXPORT_DELETED, data: json!({"id": "é"}), at };
    assert_eq!(session.event(&event), None, "before the negotiation");
    send(&mut session, "{'execute':'qmp_capabilities'}").expect_err("no command");
    let expected = "{\"timestamp\": {\"seconds\": 1, \"microseconds\": 7}, \"event\": \
                    \"BLOCK_EXPORT_DELETED\", \"data\": {\"id\": \"\\u00E9\"}}\r\n";
    assert_eq!(session.event(&event).as_deref(), Some(expected));

    let mut input = &b"{'execute':'quit','id':'x'}"[..];
    let Some(Received::Call(ticket, ..)) = session.next(&mut input) else { panic!() };
    let failed = session.answer(ticket, Err(QmpError::device_not_found("/x")));
    let expected = "{\"id\": \"x\", \"error\": {\"class\": \"DeviceNotFound\", \
                    \"desc\": \"Device '/x' not found\"}}\r\n";
    assert_eq!(failed, expected);

    let mut pretty = Session::new(true);
    let mut input = &b"{'execute':'qmp_capabilities'}"[..];
    let Some(Received::Reply(reply)) = pretty.next(&mut input) else { panic!() };
    assert_eq!(reply, "{\r\n    \"return\": {\r\n    }\r\n}\r\n");
}
