//! A stream of JSON values: several per read, or one over many reads, with white space anywhere.

use serde_json::{Map, Value};

use super::lexer::{Lexed, Lexer, Token};

/// Maximum length of a value, bytes as received. Its memory is some ten times that.
pub const MAX_VALUE: usize = 256 << 10;

/// Maximum nesting of lists and objects.
pub const MAX_DEPTH: usize = crate::json::MAX_DEPTH;

/// Parses values from a stream.
///
/// A parse error is reported once, and parsing continues.
///
/// A value that is too long or too deeply nested is skipped up to the end of its line. An invalid word is skipped up to
/// the next mark. A byte of 0xff resets the stream at once.
pub struct Parser {
    lexer: Lexer,
    frames: Vec<Frame>,
    expected: Expected,
    /// Why the current value is invalid. It is read to its end nonetheless, to find where the next one begins.
    failed: Option<String>,
    /// Number of open brackets, negative if more were closed.
    braces: i32,
    brackets: i32,
    /// Bytes of the current value.
    length: usize,
    /// What is being skipped.
    skips: Skips,
}

enum Frame {
    List(Vec<Value>),
    /// With the key of the next value.
    Object(Map<String, Value>, String),
}

/// How far to skip after invalid input.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Skips {
    Nothing,
    /// Up to a mark, the end of a line, or a byte of [`RESET`].
    Word,
    /// To the end of the line, or a byte of [`RESET`].
    Line,
}

/// Bytes that never occur in UTF-8. A client sends one to reset the stream in any state.
const RESET: std::ops::RangeInclusive<u8> = 0xfe..=0xff;

impl Skips {
    /// Whether `byte` is skipped, and the state after it.
    fn step(self, byte: u8) -> (bool, Skips) {
        let ends = match self {
            Skips::Nothing => true,
            _ if RESET.contains(&byte) => true,
            Skips::Line => byte == b'\n',
            Skips::Word => b"{}[]:,".contains(&byte) || (byte.is_ascii_control() && byte != b'\t'),
        };
        if ends { (false, Skips::Nothing) } else { (true, self) }
    }
}

/// What the grammar allows next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expected {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
}

impl Default for Parser {
    fn default() -> Self {
        Self::new()
    }
}

impl Parser {
    /// Returns a parser at the beginning of a stream.
    pub fn new() -> Self {
        Parser {
            lexer: Lexer::new(),
            frames: Vec::new(),
            expected: Expected::Value,
            failed: None,
            braces: 0,
            brackets: 0,
            length: 0,
            skips: Skips::Nothing,
        }
    }

    /// Parses up to the end of the next value.
    ///
    /// Removes the parsed part from `input`. Returns `None` if all of `input` was consumed without completing a value.
    ///
    /// # Errors
    ///
    /// The input is no JSON, or exceeds a limit. The text has the position and the reason, in QEMU's words.
    pub fn next(&mut self, input: &mut &[u8]) -> Option<Result<Value, String>> {
        while let Some((&byte, rest)) = input.split_first() {
            let skipped;
            (skipped, self.skips) = self.skips.step(byte);
            if skipped {
                self.lexer.skip(byte);
                *input = rest;
                continue;
            }
            let (token, taken) = match self.lexer.step(byte) {
                Lexed::Taken => (None, true),
                Lexed::Token(token) => (Some(token), true),
                Lexed::TokenBefore(token) => (Some(token), false),
                Lexed::Stray(stray) => {
                    *input = rest;
                    let error = self.error(&stray.0);
                    self.reset();
                    // The byte itself has reset the stream or ended a line: skip nothing.
                    let fresh = RESET.contains(&byte) || byte == b'\n';
                    self.skips = if fresh { Skips::Nothing } else { Skips::Word };
                    return Some(Err(error));
                }
            };
            if taken {
                *input = rest;
                let within = self.lexer.is_within() || self.is_open();
                self.length = if within { self.length + 1 } else { 0 };
            }
            if let Some(token) = token
                && let Some(done) = self.take(token)
            {
                self.reset();
                return Some(done);
            }
            let excess = if self.length > MAX_VALUE {
                "JSON token size limit exceeded"
            } else if self.depth() > MAX_DEPTH {
                "JSON nesting depth limit exceeded"
            } else {
                continue;
            };
            self.reset();
            self.skips = Skips::Line;
            return Some(Err(excess.into()));
        }
        None
    }

    fn depth(&self) -> usize {
        usize::try_from(self.braces.saturating_add(self.brackets)).unwrap_or(0)
    }

    fn is_open(&self) -> bool {
        (self.braces > 0 || self.brackets > 0) && self.braces >= 0 && self.brackets >= 0
    }

    /// Prepares for the next value. The line count continues.
    fn reset(&mut self) {
        self.lexer.reset();
        self.frames.clear();
        self.expected = Expected::Value;
        self.failed = None;
        (self.braces, self.brackets, self.length) = (0, 0, 0);
    }

    fn error(&self, what: &str) -> String {
        let at = self.lexer.began();
        format!("{}:{}: JSON parse error, {what}", at.line, at.column)
    }

    /// Handles a token. Returns the value or error that it completes.
    fn take(&mut self, token: Token) -> Option<Result<Value, String>> {
        match token {
            Token::Mark(b'{') => self.braces += 1,
            Token::Mark(b'}') => self.braces -= 1,
            Token::Mark(b'[') => self.brackets += 1,
            Token::Mark(b']') => self.brackets -= 1,
            _ => {}
        }
        let mut value = None;
        if self.failed.is_none() {
            match self.accept(token) {
                Ok(done) => value = done,
                Err(what) => {
                    self.failed = Some(self.error(&what));
                    // Not needed any more, and may be large.
                    self.frames.clear();
                }
            }
        }
        if self.is_open() {
            return None;
        }
        match (self.failed.take(), value) {
            (Some(error), _) => Some(Err(error)),
            (None, value) => value.map(Ok),
        }
    }

    /// Applies the grammar. Returns the outermost value when it is complete.
    fn accept(&mut self, token: Token) -> Result<Option<Value>, String> {
        use Expected::{Colon, CommaOrEnd, Key, KeyOrEnd, ValueOrEnd};
        match (self.expected, token) {
            (_, Token::Bad(why)) => return Err(why),
            (ValueOrEnd | CommaOrEnd, Token::Mark(b']'))
                if matches!(self.frames.last(), Some(Frame::List(_))) =>
            {
                return Ok(self.close());
            }
            (KeyOrEnd | CommaOrEnd, Token::Mark(b'}'))
                if matches!(self.frames.last(), Some(Frame::Object(..))) =>
            {
                return Ok(self.close());
            }
            (Expected::Value | ValueOrEnd, token) => return self.begin_value(token),
            (Key | KeyOrEnd, Token::Text(text)) => {
                if let Some(Frame::Object(_, key)) = self.frames.last_mut() {
                    *key = text;
                }
                self.expected = Colon;
            }
            (Key | KeyOrEnd, _) => return Err("expecting key".into()),
            (Colon, Token::Mark(b':')) => self.expected = Expected::Value,
            (Colon, _) => return Err("expecting ':'".into()),
            (CommaOrEnd, Token::Mark(b',')) => {
                let list = matches!(self.frames.last(), Some(Frame::List(_)));
                self.expected = if list { Expected::Value } else { Key };
            }
            (CommaOrEnd, _) => {
                let list = matches!(self.frames.last(), Some(Frame::List(_)));
                let end = if list { ']' } else { '}' };
                return Err(format!("expected ',' or '{end}'"));
            }
        }
        Ok(None)
    }

    fn begin_value(&mut self, token: Token) -> Result<Option<Value>, String> {
        if let Some(Frame::Object(members, key)) = self.frames.last()
            && members.contains_key(key)
        {
            return Err("duplicate key".into());
        }
        let value = match token {
            Token::Mark(b'{') => {
                self.frames.push(Frame::Object(Map::new(), String::new()));
                self.expected = Expected::KeyOrEnd;
                return Ok(None);
            }
            Token::Mark(b'[') => {
                self.frames.push(Frame::List(Vec::new()));
                self.expected = Expected::ValueOrEnd;
                return Ok(None);
            }
            Token::Mark(_) | Token::Bad(_) => return Err("expecting value".into()),
            Token::Text(text) => Value::String(text),
            Token::Number(number) => Value::Number(number),
            Token::Bool(value) => Value::Bool(value),
            Token::Null => Value::Null,
        };
        Ok(self.put(value))
    }

    fn close(&mut self) -> Option<Value> {
        let value = match self.frames.pop()? {
            Frame::List(elements) => Value::Array(elements),
            Frame::Object(members, _) => Value::Object(members),
        };
        self.put(value)
    }

    /// Adds a value to its parent. Returns the value if it is the outermost.
    fn put(&mut self, value: Value) -> Option<Value> {
        match self.frames.last_mut() {
            None => return Some(value),
            Some(Frame::List(elements)) => elements.push(value),
            Some(Frame::Object(members, key)) => {
                members.insert(std::mem::take(key), value);
            }
        }
        self.expected = Expected::CommaOrEnd;
        None
    }
}
