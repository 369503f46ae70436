//! Reference of an image to its backing file.

use crate::Format;

/// Maximum length of a displayed name.
const MAX_NAME_CHARS: usize = 1024;

/// Reference of an image to its backing file.
pub(crate) struct BackingFile {
    /// Name, as the image has it.
    pub(crate) name: String,
    pub(crate) id: BackingId,
}

/// Identity of a backing file.
pub(crate) enum BackingId {
    /// Any file, as a raw disk.
    Raw,
    /// Any format.
    Any,
    /// An image of this format with one of these identities.
    One(Format, Vec<String>),
}

/// Decodes UTF-16 up to its end or the first zero, at most [`MAX_NAME_CHARS`] characters.
pub(crate) fn decode_utf16(bytes: &[u8], number: fn([u8; 2]) -> u16) -> String {
    let numbers = bytes.chunks_exact(2).filter_map(|pair| pair.try_into().ok()).map(number);
    let text: Vec<u16> = numbers.take_while(|unit| *unit != 0).take(MAX_NAME_CHARS).collect();
    String::from_utf16_lossy(&text)
}
