//! Text forms of names that need not be UTF-8.
//!
//! ```text
//!   shown         "/srv/\xff.img"     for people: each byte that is not UTF-8 is `\xNN`
//!   hexadecimal   "2f7372762fff..."   for programs: all bytes
//! ```

use std::ffi::OsStr;
use std::fmt::{self, Display, Formatter};
use std::os::unix::ffi::OsStrExt;

/// Shows paths of the host in messages. `Path::display` would replace bytes that are not UTF-8, and
/// two names would look alike.
pub trait ShowPath {
    /// Returns the path as text; each byte that is not UTF-8 is `\xNN`.
    fn shown(&self) -> ShownPath<'_>;
}

impl<T: AsRef<OsStr> + ?Sized> ShowPath for T {
    fn shown(&self) -> ShownPath<'_> {
        ShownPath(self.as_ref().as_bytes())
    }
}

/// A path as text. See [`ShowPath`].
#[derive(Clone, Copy, Debug)]
pub struct ShownPath<'p>(&'p [u8]);

impl Display for ShownPath<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if let Ok(text) = std::str::from_utf8(self.0) {
            return f.pad(text);
        }
        f.pad(&escape_non_utf8(self.0))
    }
}

/// Converts bytes to text; each byte that is not UTF-8 becomes `\xNN`.
pub fn escape_non_utf8(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        text += chunk.valid();
        text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
    }
    text
}

/// Formats bytes in hexadecimal.
pub fn format_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses bytes in hexadecimal; `None` if the text is something else.
pub fn parse_hex(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |digit: &u8| char::from(*digit).to_digit(16);
    let byte = |digits: &[u8]| match digits {
        [high, low] => u8::try_from(digit(high)? << 4 | digit(low)?).ok(),
        _ => None,
    };
    text.chunks(2).map(byte).collect()
}

/// Returns the bytes in hexadecimal if they are not UTF-8.
pub fn hex_if_not_utf8(bytes: &[u8]) -> Option<String> {
    std::str::from_utf8(bytes).is_err().then(|| format_hex(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn bytes_outside_utf8_are_escaped() {
        let odd = Path::new(OsStr::from_bytes(b"/a\xff/\xc3\xa9\xc3"));
        assert_eq!(odd.shown().to_string(), "/a\\xff/é\\xc3");
        assert_eq!(format!("[{:>5}|{:<4}]", Path::new("/é").shown(), odd.join("..").shown()), {
            "[   /é|/a\\xff/é\\xc3/..]"
        });
    }

    #[test]
    fn hex_round_trips_and_rejects_other_text() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(parse_hex(format_hex(&all).as_bytes()), Some(all));
        assert_eq!(parse_hex(b"fF00"), Some(vec![255, 0]));
        for text in ["f", "0g", "+1", "fff", "0x00", " 1"] {
            assert_eq!(parse_hex(text.as_bytes()), None, "{text}");
        }
        assert_eq!(hex_if_not_utf8("é".as_bytes()), None);
        assert_eq!(hex_if_not_utf8(b"a\xff"), Some("61ff".into()));
    }
}
