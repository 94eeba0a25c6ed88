//! How QSD reads numbers, sizes, booleans and identifiers from text.

/// Returns the value of `on` or `off`, or of another word that QSD accepts.
pub fn boolean(text: &str) -> Option<bool> {
    match text {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// Returns a signed integer of 64 bits.
///
/// The text is decimal, `0x` hexadecimal or, with a leading `0`, octal.
pub fn integer(text: &str) -> Option<i64> {
    let (negative, digits) = sign(text);
    let magnitude = match digits.strip_prefix('0') {
        Some("") => 0,
        Some(rest) => match rest.strip_prefix(['x', 'X']) {
            Some(hex) => unsigned(hex, 16)?,
            None => unsigned(rest, 8)?,
        },
        None => unsigned(digits, 10)?,
    };
    let magnitude = i128::from(magnitude);
    i64::try_from(if negative { -magnitude } else { magnitude }).ok()
}

/// Returns a number of bytes, with an optional suffix.
///
/// Suffixes are B (1), K (2^10), M, G, T, P, E in either case. With a suffix other than B a decimal
/// fraction is allowed. `0x` hexadecimal goes without a suffix.
pub fn size(text: &str) -> Option<u64> {
    let (negative, text) = sign(text);
    if negative {
        return None;
    }
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return unsigned(hex, 16);
    }
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let shift = match suffix {
        "" | "b" | "B" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        "p" | "P" => 50,
        "e" | "E" => 60,
        _ => return None,
    };
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) => (whole, fraction),
        None => (number, ""),
    };
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let whole = if whole.is_empty() { 0 } else { unsigned(whole, 10)? };
    let bytes = whole.checked_mul(1 << shift)?;
    let zero = fraction.bytes().all(|digit| digit == b'0');
    if zero {
        return Some(bytes);
    }
    if shift == 0 {
        return None;
    }
    let fraction: f64 = format!("0.{fraction}").parse().ok()?;
    bytes.checked_add((fraction * (1u64 << shift) as f64) as u64)
}

/// Strips leading white space and the sign, as C's strtoll does.
fn sign(text: &str) -> (bool, &str) {
    let text = text.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r']);
    match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    }
}

/// Digits only: `from_str_radix` alone would take a second sign.
fn unsigned(digits: &str, radix: u32) -> Option<u64> {
    digits.chars().all(|c| c.is_digit(radix)).then(|| u64::from_str_radix(digits, radix).ok())?
}

/// Returns whether `id` is an identifier.
///
/// An identifier is a letter, then letters, digits, `-`, `.`, `_`.
pub fn is_identifier(id: &str) -> bool {
    id.starts_with(|c: char| c.is_ascii_alphabetic())
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'))
}

/// [`is_identifier`] in words, for errors.
pub const IDENTIFIER_HINT: &str =
    "Identifiers consist of letters, digits, '-', '.', '_', starting with a letter.";
