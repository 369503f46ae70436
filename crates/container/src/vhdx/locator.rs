//! Parent locator of a differencing VHDX: pairs of strings.
//!
//! ```text
//!   | type | count | offset and length of each key and value .. | strings in UTF-16 |
//! ```
//! `parent_linkage` is the data GUID of the parent image or, while one is merged into the other,
//! `parent_linkage2`.

use super::guid;
use crate::backing::reference::{BackingFile, BackingId, decode_utf16};
use crate::image_file::{le16, le32};
use crate::{Error, Format, UnsupportedFeature};

/// Maximum length of a locator, and maximum pairs: five are known, for Windows paths.
pub(super) const MAX_LOCATOR_BYTES: u32 = 1 << 20;
const MAX_PAIRS: u16 = 64;

pub(super) const LOCATOR_TYPE: [u8; 16] =
    guid(0xB04A_EFB7, 0xD19E, 0x4A81, [0xB7, 0x89, 0x25, 0xB8, 0xE9, 0x44, 0x59, 0x13]);

/// Returns the parent image named by `locator`.
pub(super) fn parse_parent(locator: &[u8]) -> Result<BackingFile, Error> {
    if !locator.starts_with(&LOCATOR_TYPE) {
        let what = "a parent that is found in a way that is not known";
        return Err(UnsupportedFeature::Feature("VHDX", what).into());
    }
    let text = |at: u32, len: u16| {
        let end = (at as usize).saturating_add(len.into());
        decode_utf16(locator.get(at as usize..end).unwrap_or_default(), u16::from_le_bytes)
    };
    let pairs = (0..usize::from(le16(locator, 18).min(MAX_PAIRS))).map(|nth| {
        let at = 20 + 12 * nth;
        let key = text(le32(locator, at), le16(locator, at + 8));
        (key, text(le32(locator, at + 4), le16(locator, at + 10)))
    });
    let pairs: Vec<(String, String)> = pairs.collect();
    let all = |keys: &[&str]| -> Vec<String> {
        let found = |key: &&str| pairs.iter().find(|(found, _)| found == key);
        keys.iter().filter_map(found).map(|(_, value)| value.clone()).collect()
    };
    let identities = all(&["parent_linkage", "parent_linkage2"]);
    let is_guid = |text: &String| {
        let digits = text.bytes().filter(u8::is_ascii_hexdigit).count();
        (digits, text.len()) == (32, format_guid(&[]).len())
    };
    if identities.is_empty() || !identities.iter().all(is_guid) {
        return Err(Error::Damaged("VHDX: it does not say which image it differs from"));
    }
    let identities = identities.iter().map(|text| text.to_ascii_lowercase()).collect();
    let names = all(&["relative_path", "absolute_win32_path", "volume_path"]);
    let name = names.into_iter().next().unwrap_or_default();
    Ok(BackingFile { name, id: BackingId::One(Format::Vhdx, identities) })
}

/// Formats a GUID as in a locator, in lower case.
pub(super) fn format_guid(guid: &[u8]) -> String {
    // Its first three numbers are stored little-endian.
    let order = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
    let digits = order.iter().map(|nth| format!("{:02x}", guid.get(*nth).copied().unwrap_or(0)));
    let mut text: String = digits.collect();
    for at in [20, 16, 12, 8] {
        text.insert(at, '-');
    }
    format!("{{{text}}}")
}
