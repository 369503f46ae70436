//! Case-insensitive names: folding before comparison and hashing.
//!
//! ```text
//!   name ──▶ decompose, fold case, decompose ──▶ drop ignorable characters ──▶ order marks
//! ```
//! Volumes use the tables of Unicode 12.1. Unicode's stability policies keep decomposition and
//! folding of existing characters in newer versions, so the libraries' newer tables serve.
//! `assigned` lists the characters of 12.1; all others fold to themselves.

mod assigned;

use caseless::Caseless;
use unicode_normalization::char::{canonical_combining_class, decompose_canonical};

/// The only encoding, `utf8-12.1`.
pub const UTF8: u16 = 1;
/// Bit of `s_encoding_flags`: invalid names are refused.
pub const FLAG_STRICT: u16 = 1;
/// Bit of `s_encoding_flags`: lookups use the hash only, without a linear search.
pub const FLAG_NO_COMPAT_FALLBACK: u16 = 2;

/// Characters dropped by folding: `Default_Ignorable_Code_Point`, with its reserved ranges.
const IGNORABLE: [(char, char); 17] = [
    ('\u{AD}', '\u{AD}'),
    ('\u{34F}', '\u{34F}'),
    ('\u{61C}', '\u{61C}'),
    ('\u{115F}', '\u{1160}'),
    ('\u{17B4}', '\u{17B5}'),
    ('\u{180B}', '\u{180E}'),
    ('\u{200B}', '\u{200F}'),
    ('\u{202A}', '\u{202E}'),
    ('\u{2060}', '\u{206F}'),
    ('\u{3164}', '\u{3164}'),
    ('\u{FE00}', '\u{FE0F}'),
    ('\u{FEFF}', '\u{FEFF}'),
    ('\u{FFA0}', '\u{FFA0}'),
    ('\u{FFF0}', '\u{FFF8}'),
    ('\u{1BCA0}', '\u{1BCA3}'),
    ('\u{1D173}', '\u{1D17A}'),
    ('\u{E0000}', '\u{E0FFF}'),
];

/// Limit of characters that one character decomposes to, with a margin.
const MAX_DECOMPOSED: usize = 32;

/// Folds `name`; `None` if it is not valid UTF-8 and stays as it is.
pub fn fold_name(name: &[u8]) -> Option<Vec<u8>> {
    let name = std::str::from_utf8(name).ok()?;
    let mut folded = String::with_capacity(name.len());
    let mut marks: Vec<(u8, char)> = Vec::new();
    for point in name.chars() {
        if is_ignorable(point) || !assigned::is_assigned(point) {
            flush_sorted_marks(&mut marks, &mut folded);
            folded.extend((!is_ignorable(point)).then_some(point));
            continue;
        }
        for part in decompose(point) {
            match canonical_combining_class(part) {
                0 => {
                    flush_sorted_marks(&mut marks, &mut folded);
                    folded.push(part);
                }
                class => marks.push((class, part)),
            }
        }
    }
    flush_sorted_marks(&mut marks, &mut folded);
    Some(folded.into_bytes())
}

/// Writes the marks of one character, ordered by combining class.
fn flush_sorted_marks(marks: &mut Vec<(u8, char)>, to: &mut String) {
    marks.sort_by_key(|(class, _)| *class);
    to.extend(marks.drain(..).map(|(_, mark)| mark));
}

fn is_ignorable(point: char) -> bool {
    IGNORABLE.iter().any(|(first, last)| (*first..=*last).contains(&point))
}

/// Decomposes and folds one character.
fn decompose(point: char) -> Vec<char> {
    let mut parts = vec![point];
    // Folding may yield decomposable characters, and vice versa; two rounds suffice for all
    // characters.
    for _ in 0..2 {
        let mut decomposed = Vec::with_capacity(parts.len());
        for part in &parts {
            decompose_canonical(*part, |piece| decomposed.push(piece));
        }
        parts = decomposed.into_iter().default_case_fold().take(MAX_DECOMPOSED).collect();
    }
    let mut decomposed = Vec::with_capacity(parts.len());
    for part in parts {
        decompose_canonical(part, |piece| decomposed.push(piece));
    }
    decomposed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fold(name: &str) -> Option<String> {
        fold_name(name.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn equivalent_names_fold_equally() {
        for (one, other) in [
            ("README", "readme"),
            ("\u{C9}t\u{E9}", "e\u{301}TE\u{301}"),
            ("STRASSE", "stra\u{DF}e"),
            ("\u{1F80}", "\u{3B1}\u{313}\u{3B9}"),
            ("soft\u{AD}hyphen", "SoftHyphen"),
            ("a\u{323}\u{307}", "A\u{307}\u{323}"),
            ("\u{AC01}", "\u{1100}\u{1161}\u{11A8}"),
        ] {
            assert_eq!(fold(one), fold(other), "{one}");
            assert!(fold(one).is_some());
        }
        assert_ne!(fold("a"), fold("b"));
        // A character between two marks keeps their order.
        assert_ne!(fold("a\u{307}\u{34F}\u{323}"), fold("a\u{323}\u{307}"));
        assert_eq!(fold("\u{200B}"), Some(String::new()));
    }

    #[test]
    fn folding_is_idempotent() {
        let mut random = draconis_device::Random::new(7);
        let ranges =
            [0x40..0x500, 0x1E00..0x2100, 0xA640..0xABC0, 0x1_0400..0x1_0500, 0..0x11_0000];
        for _ in 0..20_000 {
            let name: String = (0..random.next_below(12))
                .filter_map(|_| {
                    let range = &ranges[random.next_below(5) as usize];
                    let span = u64::from(range.end - range.start);
                    char::from_u32(range.start + random.next_below(span) as u32)
                })
                // Between two marks these keep an order that differs without them.
                .filter(|point| !is_ignorable(*point))
                .collect();
            let folded = fold(&name).unwrap();
            assert_eq!(fold(&folded).as_ref(), Some(&folded), "{}", name.escape_unicode());
        }
    }

    #[test]
    fn invalid_utf8_and_unassigned_characters_are_not_folded() {
        for name in [&b"\xFF"[..], b"a\xC0\x80", b"\xED\xA0\x80"] {
            assert_eq!(fold_name(name), None, "{}", name.escape_ascii());
        }
        // A capital letter of Unicode 14, and a mark of Unicode 15.
        assert_eq!(fold("A\u{A7C0}\u{10EFD}\u{301}"), Some("a\u{A7C0}\u{10EFD}\u{301}".into()));
    }
}
