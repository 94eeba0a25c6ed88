//! What a store says of a refusal: the code and the message of its XML. Pure, and ready for any bytes.

/// Bytes of a body that are looked at.
pub(super) const LONGEST: usize = 16 << 10;
/// Characters of a message that an error has.
const MESSAGE: usize = 300;
/// The longest code, region or time.
const WORD: usize = 64;

/// What a store says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Said {
    /// One word: `NoSuchKey`.
    pub(super) code: String,
    /// Printable, and at most [`MESSAGE`] characters. Empty: there is none.
    pub(super) message: String,
    /// The region that the store names.
    pub(super) region: Option<String>,
    /// The store's time, as it writes it.
    pub(super) server_time: Option<String>,
}

impl Said {
    /// Reads the beginning of a body. `None`: no store says this.
    pub(super) fn of(body: &[u8]) -> Option<Said> {
        let text = String::from_utf8_lossy(body.get(..LONGEST).unwrap_or(body));
        let error = text.get(text.find("<Error")?..)?;
        let word = |name| element(error, name).filter(|word| is_word(word)).map(str::to_owned);
        Some(Said {
            code: word("Code")?,
            message: element(error, "Message").map(shown).unwrap_or_default(),
            region: word("Region"),
            server_time: word("ServerTime"),
        })
    }
}

/// Returns the text of the first element of that name, without attributes.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, behind) = text.split_once(&format!("<{name}>"))?;
    Some(behind.split_once(&format!("</{name}>"))?.0.trim())
}

fn is_word(text: &str) -> bool {
    let is_of_word = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:+".contains(&byte);
    (1..=WORD).contains(&text.len()) && text.bytes().all(is_of_word)
}

/// Returns a message for a log, on one line.
fn shown(message: &str) -> String {
    const ENTITIES: [(&str, &str); 5] =
        [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];
    let plain = ENTITIES.iter().fold(message.to_owned(), |text, (from, to)| text.replace(from, to));
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut shown: String = plain.chars().take(MESSAGE).map(clean).collect();
    if shown.len() < plain.len() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_and_message_are_read() {
        let body = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>NoSuchKey</Code>\
                    <Message>The &quot;key&quot; does\nnot &amp;lt; exist.</Message><Region>eu-west-1</Region></Error>";
        let said = Said::of(body.as_bytes()).unwrap();
        assert_eq!(said.code, "NoSuchKey");
        assert_eq!(said.message, "The \"key\" does not &lt; exist.");
        assert_eq!((said.region.as_deref(), said.server_time), (Some("eu-west-1"), None));
    }

    #[test]
    fn whatever_a_store_sends_is_short_and_printable() {
        let long = format!("<Error><Code>A</Code><Message>{}</Message>", "é\u{1b}[2J".repeat(1000));
        let said = Said::of(long.as_bytes()).unwrap();
        assert_eq!(said.message.chars().count(), MESSAGE + 1);
        assert!(!said.message.contains(char::is_control));
        let beyond = format!("<Error><Code>{}</Code>", "A".repeat(LONGEST));
        let binary: Vec<u8> = (0..LONGEST + 7).map(|at| (at * 7) as u8).collect();
        for none in [
            b"" as &[u8],
            b"<Error>",
            b"<Error><Code></Code>",
            b"<Error><Code>a b</Code>",
            b"<Error><Code>A</Error>",
            b"<html><Code>A</Code></html>",
            b"\xff\xfe<\x00E\x00",
            beyond.as_bytes(),
            &binary,
        ] {
            assert_eq!(Said::of(none), None);
        }
        let cut = "<Error><Code>A</Code><Message>é".as_bytes();
        let said = Said::of(&cut[..cut.len() - 1]).unwrap();
        assert_eq!((&*said.code, &*said.message), ("A", ""));
    }
}
