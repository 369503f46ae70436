//! Text form of keys and values: any bytes, on one line.
//!
//! Law 1: encoding is lossless.

use draconis_types::path_bytes::parse_hex;

/// Encoding of bytes as text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TextEncoding {
    /// Plain text with backslash escapes.
    Escaped,
    /// Two hexadecimal digits per byte.
    Hex,
}

impl TextEncoding {
    /// Returns `Hex` if it is requested.
    pub fn from_hex_flag(is_hex: bool) -> Self {
        if is_hex { Self::Hex } else { Self::Escaped }
    }

    /// Appends `bytes` as text without tabs and newlines.
    pub fn encode(self, bytes: &[u8], out: &mut Vec<u8>) {
        match self {
            Self::Hex => {
                bytes.iter().for_each(|byte| out.extend(format!("{byte:02x}").into_bytes()));
            }
            Self::Escaped => escape(bytes, out),
        }
    }

    /// Parses text of [`encode`](Self::encode), or typed by a user.
    ///
    /// # Errors
    /// Description of the syntax error, to be appended to the line number.
    pub fn decode(self, text: &[u8]) -> Result<Vec<u8>, String> {
        match self {
            Self::Hex if !text.len().is_multiple_of(2) => {
                Err("has an odd number of hexadecimal digits".to_owned())
            }
            Self::Hex => text.chunks(2).map(parse_hex_byte).collect(),
            Self::Escaped => unescape(text),
        }
    }
}

fn escape(bytes: &[u8], out: &mut Vec<u8>) {
    let number = |byte: &u8| format!("\\x{byte:02x}").into_bytes();
    for chunk in bytes.utf8_chunks() {
        let mut rest = chunk.valid();
        // Fast path: most values need no escapes.
        while let Some(at) = rest.find(|c: char| c.is_control() || c == '\\') {
            out.extend_from_slice(&rest.as_bytes()[..at]);
            let len = rest[at..].chars().next().map_or(0, char::len_utf8);
            match &rest.as_bytes()[at..at + len] {
                b"\\" => out.extend_from_slice(b"\\\\"),
                b"\t" => out.extend_from_slice(b"\\t"),
                b"\n" => out.extend_from_slice(b"\\n"),
                b"\r" => out.extend_from_slice(b"\\r"),
                control => control.iter().for_each(|byte| out.extend(number(byte))),
            }
            rest = &rest[at + len..];
        }
        out.extend_from_slice(rest.as_bytes());
        chunk.invalid().iter().for_each(|byte| out.extend(number(byte)));
    }
}

fn unescape(text: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.iter().position(|byte| *byte == b'\\') {
        out.extend_from_slice(&rest[..at]);
        let (bytes, len) = match rest.get(at + 1) {
            Some(b'\\') => (b'\\', 2),
            Some(b't') => (b'\t', 2),
            Some(b'n') => (b'\n', 2),
            Some(b'r') => (b'\r', 2),
            Some(b'x') => (parse_hex_byte(rest.get(at + 2..at + 4).unwrap_or_default())?, 4),
            next => {
                let next = next.map(|byte| byte.escape_ascii().to_string()).unwrap_or_default();
                return Err(format!("has \\{next}, which is no escape: a backslash is \\\\"));
            }
        };
        out.push(bytes);
        rest = &rest[at + len..];
    }
    out.extend_from_slice(rest);
    Ok(out)
}

/// Parses two hexadecimal digits.
fn parse_hex_byte(digits: &[u8]) -> Result<u8, String> {
    match parse_hex(digits).as_deref() {
        Some([byte]) => Ok(*byte),
        _ => Err(format!("has '{}' for two hexadecimal digits", digits.escape_ascii())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_bytes_round_trip() {
        let all: Vec<u8> = (0..=255).collect();
        let texts = [&all[..], b"", b"\\", b"\\t\t\\x00\0", "größe\u{85}\u{2028}".as_bytes()];
        for form in [TextEncoding::Escaped, TextEncoding::Hex] {
            for bytes in texts {
                let mut text = vec![];
                form.encode(bytes, &mut text);
                assert!(!text.iter().any(|byte| b"\t\n\r".contains(byte)), "{form:?}");
                assert!(std::str::from_utf8(&text).is_ok(), "{form:?}");
                assert_eq!(form.decode(&text).unwrap(), bytes, "{form:?}");
            }
        }
    }

    #[test]
    fn invalid_escapes_are_refused() {
        for text in ["\\", "\\q", "\\x", "\\x1", "\\xg0", "\\x+1"] {
            assert!(TextEncoding::Escaped.decode(text.as_bytes()).is_err(), "{text}");
        }
        for text in ["1", "0g", "+1"] {
            assert!(TextEncoding::Hex.decode(text.as_bytes()).is_err(), "{text}");
        }
        assert_eq!(TextEncoding::Hex.decode(b"0aFF").unwrap(), b"\n\xff");
    }
}
