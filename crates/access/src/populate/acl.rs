//! Access control lists as text, as in archives, and as bytes, as in Linux xattrs.
//!
//! ```text
//!   user::rwx,user:1000:r-x,user:alice:r--:1001,group::r-x,mask::r-x,other::---
//! ```
//! `star` appends the number to a name; GNU tar without `--numeric-owner` writes names alone, and
//! resolves them on the machine that extracts.

use std::collections::HashMap;

/// Version number at the start of the bytes.
const ACL_XATTR_VERSION: u32 = 2;

/// User and group numbers of this machine, by name.
#[derive(Default)]
pub struct UserGroupIds {
    users: HashMap<String, u32>,
    groups: HashMap<String, u32>,
}

impl UserGroupIds {
    /// Reads `/etc/passwd` and `/etc/group`; a missing file counts as empty.
    pub fn from_etc_files() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self {
            users: parse_passwd_lines(&read("/etc/passwd")),
            groups: parse_passwd_lines(&read("/etc/group")),
        }
    }
}

/// Parses the names and numbers of `name:password:number:..` lines.
fn parse_passwd_lines(text: &str) -> HashMap<String, u32> {
    let line = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        Some((name, fields.nth(1)?.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

/// Encodes a list as the value of `system.posix_acl_*`; `None` if the text is no list, or contains
/// an unknown name.
pub fn from_text(words: &[u8], names: &UserGroupIds) -> Option<Vec<u8>> {
    let words = std::str::from_utf8(words).ok()?;
    let mut entries = vec![];
    for entry in words.split([',', '\n']).map(str::trim).filter(|it| !it.is_empty()) {
        // Comments of `getfacl`.
        let entry = entry.split(['#', '\t']).next()?.trim();
        let mut fields = entry.split(':');
        let (kind, who, rights) = (fields.next()?, fields.next()?, fields.next()?);
        let id = match fields.next().filter(|id| !id.is_empty()) {
            Some(id) => Some(id),
            None => Some(who).filter(|who| !who.is_empty()),
        };
        let id = match id {
            Some(id) => {
                let named = match kind.starts_with('u') {
                    true => &names.users,
                    false => &names.groups,
                };
                Some(id.parse::<u32>().ok().or_else(|| named.get(id).copied())?)
            }
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
    let mut bytes = ACL_XATTR_VERSION.to_le_bytes().to_vec();
    for (tag, id, right) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(right.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    Some(bytes)
}

/// Formats the value of `system.posix_acl_*` as text, with numbers for users and groups; `None`
/// if the bytes are not a list.
pub fn to_text(bytes: &[u8]) -> Option<Vec<u8>> {
    let (version, lines) = bytes.split_first_chunk::<4>()?;
    if *version != ACL_XATTR_VERSION.to_le_bytes() || lines.is_empty() || lines.len() % 8 != 0 {
        return None;
    }
    let mut words = vec![];
    for line in lines.chunks_exact(8) {
        let &[tag, 0, rights, 0, ref id @ ..] = line else { return None };
        let id = u32::from_le_bytes(id.try_into().ok()?);
        let (kind, id) = match tag {
            0x01 => ("user", None),
            0x02 => ("user", Some(id)),
            0x04 => ("group", None),
            0x08 => ("group", Some(id)),
            0x10 => ("mask", None),
            0x20 => ("other", None),
            _ => return None,
        };
        let id = id.map(|id| id.to_string()).unwrap_or_default();
        let letter = |bit: u8, letter| if rights & bit != 0 { letter } else { '-' };
        let rights = [letter(4, 'r'), letter(2, 'w'), letter(1, 'x')].iter().collect::<String>();
        words.push(format!("{kind}:{id}:{rights}"));
    }
    Some(words.join(",").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acl_text_encodes_to_xattr() {
        let list = b"user::rw-,user:alice:r--:1000,group::r--,group:7:rwx,mask::rwx,other::---";
        let none = UserGroupIds::default();
        let bytes = from_text(list, &none).unwrap();
        assert_eq!(bytes.len(), 4 + 6 * 8);
        assert_eq!(bytes[..12], [2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255]);
        assert_eq!(bytes[12..20], [2, 0, 4, 0, 0xE8, 3, 0, 0]);
        assert_eq!(bytes[28..36], [8, 0, 7, 0, 7, 0, 0, 0]);
        let numbers = b"user::rw-,user:1000:r--,group::r--,group:7:rwx,mask::rwx,other::---";
        assert_eq!(to_text(&bytes).unwrap(), numbers);
        assert_eq!(super::from_text(numbers, &none).unwrap(), bytes);
        for bad in [&b""[..], &bytes[..4], &bytes[..11], &[1, 0, 0, 0], &[9; 12]] {
            assert_eq!(to_text(bad), None);
        }
    }

    #[test]
    fn invalid_acl_text_is_none() {
        for list in [&b""[..], b"user:alice:rwx", b"user", b"what::rwx", b"user::rwq", &[0xFF]] {
            assert_eq!(from_text(list, &UserGroupIds::default()), None);
        }
        let users =
            parse_passwd_lines("root:x:0:0::/:/bin/sh\nalice:x:1000:1:\nbroken\nno:x:number:");
        let names = UserGroupIds { users, groups: parse_passwd_lines("staff:x:50:\n") };
        let list = b"user::rwx,user:alice:rwx,group::r--,group:staff:r--,mask::rwx,other::---";
        let numbers = b"user::rwx,user:1000:rwx,group::r--,group:50:r--,mask::rwx,other::---";
        assert_eq!(to_text(&from_text(list, &names).unwrap()).unwrap(), numbers);
        assert_eq!(from_text(b"group:alice:rwx", &names), None);
    }
}
