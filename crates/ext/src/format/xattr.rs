//! Extended attributes: a list of entries growing up, values growing down.
//!
//! ```text
//!   | head | entry .. entry | 0 0 0 0 |   free   | value .. value |
//! ```
//! In a block of its own (head of 32 bytes, values counted from the start of the block)
//! or behind the fields of an inode (head of 4 bytes, values counted from the first entry).

use super::{le16, le32};
use crate::{Error, Result};

const ENTRY_BYTES: usize = 16;
const MAGIC: u32 = 0xEA02_0000;
const BLOCK_HEAD_BYTES: usize = 32;

/// The prefix that an entry's number stands for; others are hidden, as Linux hides them.
fn prefix(number: u8) -> Option<&'static [u8]> {
    Some(match number {
        1 => b"user.",
        2 => b"system.posix_acl_access",
        3 => b"system.posix_acl_default",
        4 => b"trusted.",
        6 => b"security.",
        7 => b"system.",
        8 => b"system.richacl",
        _ => return None,
    })
}

/// One attribute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attribute<'a> {
    prefix: &'static [u8],
    suffix: &'a [u8],
    value: Option<&'a [u8]>,
}

impl<'a> Attribute<'a> {
    /// The full name.
    pub fn name(&self) -> Vec<u8> {
        [self.prefix, self.suffix].concat()
    }

    /// Whether `name` is its full name.
    pub fn is(&self, name: &[u8]) -> bool {
        name.strip_prefix(self.prefix) == Some(self.suffix)
    }

    /// Whether it is an access control list, which Linux shows in another form.
    pub fn is_acl(&self) -> bool {
        self.suffix.is_empty() && self.prefix.starts_with(b"system.posix_acl_")
    }

    /// The bytes on disk.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if they lie outside the list.
    pub fn value(&self) -> Result<&'a [u8]> {
        self.value.ok_or(Error::corrupt("extended attribute: value"))
    }
}

/// A list of attributes.
#[derive(Debug)]
pub struct Attributes<'a> {
    entries: &'a [u8],
    values: &'a [u8],
    at: usize,
}

impl<'a> Attributes<'a> {
    /// The list in a block.
    ///
    /// # Errors
    /// [`Error::Corrupt`] without the magic number.
    pub fn of_block(block: &'a [u8]) -> Result<Self> {
        let entries = block.get(BLOCK_HEAD_BYTES..);
        match (le32(block, 0), le32(block, 8), entries) {
            (Some(MAGIC), Some(1), Some(entries)) => Ok(Self { entries, values: block, at: 0 }),
            _ => Err(Error::corrupt("extended attribute block")),
        }
    }

    /// The list that starts with `body` inside an inode.
    pub fn of_body(body: &'a [u8]) -> Self {
        Self { entries: body, values: body, at: 0 }
    }

    /// The entry at the current place, and where the next one is.
    fn entry(&self, head: &'a [u8]) -> Option<(Option<Attribute<'a>>, usize)> {
        let (name_len, number) = (usize::from(*head.first()?), *head.get(1)?);
        let value_at = usize::from(le16(head, 2)?);
        let elsewhere = le32(head, 4)? != 0;
        let value_len = usize::try_from(le32(head, 8)?).ok()?;
        let suffix = head.get(ENTRY_BYTES..)?.get(..name_len)?;
        let value = match value_len {
            _ if elsewhere => None,
            0 => Some(&[][..]),
            len => self.values.get(value_at..).and_then(|rest| rest.get(..len)),
        };
        let len = ENTRY_BYTES.checked_add(name_len)?.checked_next_multiple_of(4)?;
        let shown = prefix(number).map(|prefix| Attribute { prefix, suffix, value });
        Some((shown, self.at.checked_add(len)?))
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Result<Attribute<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let head = self.entries.get(self.at..)?;
            // A list may also end with the space it is in.
            if le32(head, 0).is_none_or(|first| first == 0) {
                return None;
            }
            match self.entry(head) {
                Some((shown, next)) => {
                    self.at = next;
                    if let Some(attribute) = shown {
                        return Some(Ok(attribute));
                    }
                }
                None => {
                    self.at = self.entries.len();
                    return Some(Err(Error::corrupt("extended attribute: entry")));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_up_to_its_damage() {
        let mut body = vec![0; 96];
        body[0..4].copy_from_slice(&[3, 1, 90, 0]);
        body[8] = 5;
        body[16..19].copy_from_slice(b"abc");
        body[90..95].copy_from_slice(b"value");
        body[20..24].copy_from_slice(&[200, 1, 0, 0]);
        let found: Vec<_> = Attributes::of_body(&body).collect();
        assert_eq!(found.len(), 2);
        let first = found[0].as_ref().unwrap();
        assert!(first.is(b"user.abc") && !first.is(b"user.ab"));
        assert_eq!(first.value().unwrap(), b"value");
        assert!(found[1].is_err());
    }
}
