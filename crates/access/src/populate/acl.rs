//! Access control lists as archives have them in words, and as Linux has them in bytes.
//!
//! ```text
//!   user::rwx,user:1000:r-x,user:alice:r--:1001,group::r-x,mask::r-x,other::---
//! ```
//! `star` adds a number behind a name; `tar` writes names alone, unless told `--numeric-owner`.

/// The version that the bytes begin with.
const VERSION: u32 = 2;

/// The bytes of a list, as `system.posix_acl_*` takes them; `None` where it says nothing that
/// can be understood without a table of users.
pub fn bytes(words: &[u8]) -> Option<Vec<u8>> {
    let words = std::str::from_utf8(words).ok()?;
    let mut entries = vec![];
    for entry in words.split([',', '\n']).map(str::trim).filter(|it| !it.is_empty()) {
        // What `getfacl` remarks.
        let entry = entry.split(['#', '\t']).next()?.trim();
        let mut fields = entry.split(':');
        let (kind, who, rights) = (fields.next()?, fields.next()?, fields.next()?);
        let id = match fields.next().filter(|id| !id.is_empty()) {
            Some(id) => Some(id),
            None => Some(who).filter(|who| !who.is_empty()),
        };
        let id = match id {
            Some(id) => Some(id.parse::<u32>().ok()?),
            None => None,
        };
        let tag: u16 = match (kind, id) {
            ("user" | "u", None) => 0x01,
            ("user" | "u", Some(_)) => 0x02,
            ("group" | "g", None) => 0x04,
            ("group" | "g", Some(_)) => 0x08,
            ("mask" | "m", None) => 0x10,
            ("other" | "o", None) => 0x20,
            _ => return None,
        };
        let mut right: u16 = 0;
        for letter in rights.chars() {
            right |= match letter {
                'r' => 4,
                'w' => 2,
                'x' => 1,
                '-' => 0,
                _ => return None,
            };
        }
        entries.push((tag, id.unwrap_or(u32::MAX), right));
    }
    if entries.is_empty() {
        return None;
    }
    entries.sort_unstable();
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, id, right) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(right.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_bytes() {
        let list = b"user::rw-,user:alice:r--:1000,group::r--,group:7:rwx,mask::rwx,other::---";
        let bytes = bytes(list).unwrap();
        assert_eq!(bytes.len(), 4 + 6 * 8);
        assert_eq!(bytes[..12], [2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255]);
        assert_eq!(bytes[12..20], [2, 0, 4, 0, 0xE8, 3, 0, 0]);
        assert_eq!(bytes[28..36], [8, 0, 7, 0, 7, 0, 0, 0]);
    }

    #[test]
    fn what_is_not_understood_is_none() {
        for list in [&b""[..], b"user:alice:rwx", b"user", b"what::rwx", b"user::rwq", &[0xFF]] {
            assert_eq!(bytes(list), None);
        }
    }
}
