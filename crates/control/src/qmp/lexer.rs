//! JSON tokens, from one byte at a time, so that input may be split anywhere.

use serde_json::Number;

/// A JSON token.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// One of `{}[]:,`.
    Mark(u8),
    /// In single or double quotes, as in QEMU.
    Text(String),
    /// A number.
    Number(Number),
    /// `true`, `false`.
    Bool(bool),
    /// `null`.
    Null,
    /// A token with an invalid value, and the reason.
    Bad(String),
}

/// A position, counted from 1; the column in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) line: u64,
    pub(super) column: u64,
}

/// Bytes that begin no token, or end one too early. The input up to here is discarded.
#[derive(Debug, PartialEq)]
pub(super) struct Stray(pub(super) String);

/// The effect of a byte.
pub(super) enum Lexed {
    /// The byte is consumed, and no token has ended.
    Taken,
    /// A token has ended with the byte.
    Token(Token),
    /// A token has ended before the byte, which is not consumed.
    TokenBefore(Token),
    /// The byte is invalid here.
    Stray(Stray),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LexerState {
    Between,
    Text { quote: u8, escaped: bool },
    Number,
    Word,
}

/// Splits bytes into tokens. Keeps the bytes of one token.
pub(super) struct Lexer {
    state: LexerState,
    bytes: Vec<u8>,
    /// Position of the next byte.
    at: Position,
    /// Where the token began.
    began: Position,
}

impl Lexer {
    pub(super) fn new() -> Self {
        let start = Position { line: 1, column: 1 };
        Lexer { state: LexerState::Between, bytes: Vec::new(), at: start, began: start }
    }

    /// Where the latest token began.
    pub(super) fn began(&self) -> Position {
        self.began
    }

    /// Whether a token has begun and not ended.
    pub(super) fn is_within(&self) -> bool {
        self.state != LexerState::Between
    }

    /// Discards a token that has begun.
    pub(super) fn reset(&mut self) {
        self.state = LexerState::Between;
        self.bytes.clear();
    }

    /// Skips a byte.
    pub(super) fn skip(&mut self, byte: u8) {
        if byte == b'\n' {
            self.at = Position { line: self.at.line.saturating_add(1), column: 1 };
        } else {
            self.at.column = self.at.column.saturating_add(1);
        }
    }

    /// Handles the next byte.
    pub(super) fn step(&mut self, byte: u8) -> Lexed {
        let lexed = self.look_at(byte);
        if !matches!(lexed, Lexed::TokenBefore(_)) {
            self.skip(byte);
        }
        lexed
    }

    fn look_at(&mut self, byte: u8) -> Lexed {
        match self.state {
            LexerState::Between => self.begin(byte),
            LexerState::Text { quote, escaped: false } if byte == quote => {
                Lexed::Token(text(&self.end()))
            }
            LexerState::Text { .. } if !(0x20..0xfe).contains(&byte) => self.stray(byte),
            LexerState::Text { quote, escaped } => {
                let escaped = byte == b'\\' && !escaped;
                self.push(byte, LexerState::Text { quote, escaped })
            }
            LexerState::Number
                if matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E') =>
            {
                self.push(byte, LexerState::Number)
            }
            LexerState::Number => {
                let bytes = self.end();
                match number(&bytes) {
                    Some(token) => Lexed::TokenBefore(token),
                    None => Lexed::TokenBefore(Token::Bad(stray_text(&bytes))),
                }
            }
            LexerState::Word if byte.is_ascii_lowercase() => self.push(byte, LexerState::Word),
            LexerState::Word => Lexed::TokenBefore(word(&self.end())),
        }
    }

    fn begin(&mut self, byte: u8) -> Lexed {
        self.began = self.at;
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' => Lexed::Taken,
            b'{' | b'}' | b'[' | b']' | b':' | b',' => Lexed::Token(Token::Mark(byte)),
            b'"' | b'\'' => {
                self.state = LexerState::Text { quote: byte, escaped: false };
                Lexed::Taken
            }
            b'-' | b'0'..=b'9' => self.push(byte, LexerState::Number),
            b'a'..=b'z' => self.push(byte, LexerState::Word),
            _ => self.stray(byte),
        }
    }

    fn push(&mut self, byte: u8, state: LexerState) -> Lexed {
        self.bytes.push(byte);
        self.state = state;
        Lexed::Taken
    }

    fn end(&mut self) -> Vec<u8> {
        self.state = LexerState::Between;
        std::mem::take(&mut self.bytes)
    }

    fn stray(&mut self, byte: u8) -> Lexed {
        let quote = match self.state {
            LexerState::Text { quote, .. } => Some(quote),
            _ => None,
        };
        let mut bytes: Vec<u8> = quote.into_iter().collect();
        bytes.append(&mut self.end());
        bytes.push(byte);
        Lexed::Stray(Stray(stray_text(&bytes)))
    }
}

/// Maximum length of invalid input in a message.
const SHOWN: usize = 64;

fn stray_text(bytes: &[u8]) -> String {
    let shown = bytes.get(..SHOWN).unwrap_or(bytes);
    format!("stray '{}'", String::from_utf8_lossy(shown))
}

fn word(bytes: &[u8]) -> Token {
    match bytes {
        b"true" => Token::Bool(true),
        b"false" => Token::Bool(false),
        b"null" => Token::Null,
        other => {
            let shown = other.get(..SHOWN).unwrap_or(other);
            Token::Bad(format!("invalid keyword '{}'", String::from_utf8_lossy(shown)))
        }
    }
}

/// serde_json checks the form of numbers. A number beyond 64 bits becomes a float, as in QEMU.
fn number(bytes: &[u8]) -> Option<Token> {
    let text = std::str::from_utf8(bytes).ok()?;
    let number: Number = serde_json::from_str(text).ok()?;
    if number.is_f64() {
        // serde_json sometimes returns an adjacent float.
        return Number::from_f64(text.parse().ok()?).map(Token::Number);
    }
    Some(Token::Number(number))
}

fn text(bytes: &[u8]) -> Token {
    let Ok(raw) = std::str::from_utf8(bytes) else {
        return Token::Bad("a string that is not valid UTF-8".into());
    };
    unescape(raw).map_or_else(Token::Bad, Token::Text)
}

fn unescape(raw: &str) -> Result<String, String> {
    const INVALID: &str = "invalid escape sequence in string";
    let mut out = String::with_capacity(raw.len());
    let mut rest = raw;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let mut chars = after.chars();
        match chars.next() {
            Some(same @ ('"' | '\'' | '\\' | '/')) => out.push(same),
            Some('b') => out.push('\u{8}'),
            Some('f') => out.push('\u{c}'),
            Some('n') => out.push('\n'),
            Some('r') => out.push('\r'),
            Some('t') => out.push('\t'),
            Some('u') => {
                let first = hex(after.get(1..5)).ok_or(INVALID)?;
                chars = after.get(5..).unwrap_or_default().chars();
                out.push(match first {
                    0xd800..=0xdbff => {
                        // The second half of a surrogate pair.
                        let follows = chars.as_str().strip_prefix("\\u");
                        let second = hex(follows.and_then(|follows| follows.get(..4)))
                            .filter(|half| (0xdc00..=0xdfff).contains(half))
                            .ok_or_else(|| not_a_character(first))?;
                        chars = chars.as_str().get(6..).unwrap_or_default().chars();
                        let code = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
                        char::from_u32(code).ok_or_else(|| not_a_character(first))?
                    }
                    _ => char::from_u32(first).ok_or_else(|| not_a_character(first))?,
                });
            }
            _ => return Err(INVALID.into()),
        }
        rest = chars.as_str();
    }
    out.push_str(rest);
    Ok(out)
}

fn not_a_character(code: u32) -> String {
    format!("\\u{code:04x} is not a valid Unicode character")
}

fn hex(digits: Option<&str>) -> Option<u32> {
    let digits = digits?;
    let all = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    all.then(|| u32::from_str_radix(digits, 16).ok())?
}
