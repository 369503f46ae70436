//! Extended attributes: a list of entries that grows up, values that grow down.
//!
//! ```text
//!   | head | entry .. entry | 0 0 0 0 |   free   | value .. value |
//! ```
//! The list is in an xattr block (header of 32 bytes, value offsets from the start of the block) or
//! behind the fields of an inode (header of 4 bytes, value offsets from the first entry).

pub mod edit;

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::Checksum;
use super::{le16, le32, put32};
use crate::{Error, FsBlock, InodeNumber, Result};

const ENTRY_BYTES: usize = size_of::<RawXattrEntry>();

/// On-disk entry, without its name.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct RawXattrEntry {
    pub(crate) e_name_len: u8,
    e_name_index: u8,
    e_value_offs: U16,
    /// Inode that holds the value; 0 if a list or block does.
    pub e_value_inum: U32,
    e_value_size: U32,
    e_hash: U32,
}

impl RawXattrEntry {
    /// Returns the entry at `at` of a list, to change it; `None` at the end of the list.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the entry is cut off.
    pub fn view_mut(list: &mut [u8], at: usize) -> Result<Option<&mut Self>> {
        let rest = list.get_mut(at..).unwrap_or_default();
        if le32(rest, 0).is_none_or(|first| first == 0) {
            return Ok(None);
        }
        let cut = Error::corrupt("extended attribute: entry");
        Self::mut_from_prefix(rest).map(|(raw, _)| Some(raw)).map_err(|_| cut)
    }

    /// Returns the bytes of the entry with its name.
    pub fn len_bytes(&self) -> usize {
        ENTRY_BYTES.saturating_add(self.e_name_len.into()).next_multiple_of(4)
    }
}
const MAGIC: u32 = 0xEA02_0000;
const BLOCK_HEAD_BYTES: usize = 32;

/// Returns the prefix for an entry's name index; other indexes are hidden, as in Linux.
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

/// An extended attribute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Xattr<'a> {
    prefix: &'static [u8],
    suffix: &'a [u8],
    value: Option<&'a [u8]>,
    ea_inode: Option<EaInodeRef>,
}

/// Reference to a value in an EA inode (`ea_inode`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EaInodeRef {
    /// EA inode.
    pub inode: InodeNumber,
    /// Bytes of the value.
    pub len: u32,
    hash: u32,
}

impl<'a> Xattr<'a> {
    /// Returns the full name.
    pub fn name(&self) -> Vec<u8> {
        [self.prefix, self.suffix].concat()
    }

    /// Returns true if `name` is the full name.
    pub fn has_name(&self, name: &[u8]) -> bool {
        name.strip_prefix(self.prefix) == Some(self.suffix)
    }

    /// Returns true for an access control list, which has another form in Linux's interface.
    pub fn is_acl(&self) -> bool {
        self.suffix.is_empty() && self.prefix.starts_with(b"system.posix_acl_")
    }

    /// Returns true if the value is the rest of inline data, which is hidden from programs.
    pub fn is_inline_data(&self) -> bool {
        self.prefix == b"system." && self.suffix == b"data"
    }

    /// Returns the EA inode of the value, if any.
    pub fn ea_inode(&self) -> Option<EaInodeRef> {
        self.ea_inode
    }

    /// Returns true if the entry's hash matches this value hash. Some writers hashed the characters
    /// of the name as signed.
    pub fn matches_ea_inode(&self, value_hash: u32) -> bool {
        let character = |byte: &u8, signed| match signed {
            true => i32::from(byte.cast_signed()).cast_unsigned(),
            false => u32::from(*byte),
        };
        let hash = |signed| {
            let name = self
                .suffix
                .iter()
                .fold(0u32, |sum, byte| sum.rotate_left(5) ^ character(byte, signed));
            name.rotate_left(16) ^ value_hash
        };
        self.ea_inode.is_none_or(|outside| [false, true].map(hash).contains(&outside.hash))
    }

    /// Returns the value as stored.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the value is not in the list.
    pub fn value(&self) -> Result<&'a [u8]> {
        self.value.ok_or(Error::corrupt("extended attribute: value"))
    }
}

/// Returns the number of inodes that share an xattr block.
pub fn refcount(block: &[u8]) -> Option<u32> {
    le32(block, 4)
}

/// Sets the number of inodes that share an xattr block.
pub fn set_refcount(block: &mut [u8], owners: u32) -> Option<()> {
    put32(block, 4, owners)
}

/// Offset of the checksum in an xattr block.
const CHECKSUM_AT: usize = 16;

/// Computes the checksum of the xattr block at `at`.
fn checksum(block: &[u8], seed: Checksum, at: FsBlock) -> Option<u32> {
    let (before, rest) = block.split_at_checked(CHECKSUM_AT)?;
    Some(seed.update_u64(at.0).update(before).update(&[0; 4]).update(rest.get(4..)?).value())
}

/// Returns true if the checksum of an xattr block is valid; `seed` is the volume's.
pub fn has_valid_checksum(block: &[u8], seed: Checksum, at: FsBlock) -> bool {
    le32(block, CHECKSUM_AT) == checksum(block, seed, at)
}

/// Returns true if two xattr blocks are equal except for their checksums.
pub fn equals_ignoring_checksum(a: &[u8], b: &[u8]) -> bool {
    let but_for_sum = |block: &[u8]| {
        let (before, rest) = block.split_at_checked(CHECKSUM_AT)?;
        Some((before.to_vec(), rest.get(4..)?.to_vec()))
    };
    but_for_sum(a) == but_for_sum(b)
}

/// Sets the checksum of an xattr block.
pub fn set_checksum(block: &mut [u8], seed: Checksum, at: FsBlock) {
    if let Some(sum) = checksum(block, seed, at) {
        let _ = put32(block, CHECKSUM_AT, sum);
    }
}

/// Iterator over a list of attributes.
#[derive(Debug)]
pub struct XattrList<'a> {
    entries: &'a [u8],
    values: &'a [u8],
    at: usize,
}

impl<'a> XattrList<'a> {
    /// Iterates over the list in an xattr block.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the magic number is wrong.
    pub fn from_block(block: &'a [u8]) -> Result<Self> {
        let entries = block.get(BLOCK_HEAD_BYTES..);
        match (le32(block, 0), le32(block, 8), entries) {
            (Some(MAGIC), Some(1), Some(entries)) => Ok(Self { entries, values: block, at: 0 }),
            _ => Err(Error::corrupt("extended attribute block")),
        }
    }

    /// Iterates over the list in an inode, which starts with `body`.
    pub fn from_inode(body: &'a [u8]) -> Self {
        Self { entries: body, values: body, at: 0 }
    }

    /// Parses the entry in `head`; returns it with the offset of the next one.
    fn entry(&self, head: &'a [u8]) -> Option<(Option<Xattr<'a>>, usize)> {
        let (name_len, number) = (usize::from(*head.first()?), *head.get(1)?);
        let value_at = usize::from(le16(head, 2)?);
        let (inode, len, hash) = (le32(head, 4)?, le32(head, 8)?, le32(head, 12)?);
        let ea_inode = (inode != 0).then_some(EaInodeRef { inode: InodeNumber(inode), len, hash });
        let value_len = usize::try_from(len).ok()?;
        let suffix = head.get(ENTRY_BYTES..)?.get(..name_len)?;
        let value = match value_len {
            _ if ea_inode.is_some() => None,
            0 => Some(&[][..]),
            len => self.values.get(value_at..).and_then(|rest| rest.get(..len)),
        };
        let len = ENTRY_BYTES.checked_add(name_len)?.checked_next_multiple_of(4)?;
        let shown = prefix(number).map(|prefix| Xattr { prefix, suffix, value, ea_inode });
        Some((shown, self.at.checked_add(len)?))
    }
}

impl<'a> Iterator for XattrList<'a> {
    type Item = Result<Xattr<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let head = self.entries.get(self.at..)?;
            // A list may also end with its buffer.
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

/// Returns the range of the inline data value in the list of an inode, which starts with `body`.
pub(crate) fn inline_value(body: &[u8]) -> Option<std::ops::Range<usize>> {
    let mut list = XattrList::from_inode(body);
    loop {
        let head = body.get(list.at..)?;
        let (found, value_at, len) = (list.entry(head)?, le16(head, 2)?, le32(head, 8)?);
        if found.0.is_some_and(|it| it.is_inline_data()) {
            let start = usize::from(value_at);
            let end = start.checked_add(usize::try_from(len).ok()?)?;
            return (end <= body.len()).then_some(start..end);
        }
        if le32(head, 0)? == 0 {
            return None;
        }
        list.at = found.1;
    }
}

/// Name indexes that programs may set, as in Linux: of `system.` only access control lists.
const SETTABLE: [u8; 5] = [1, 2, 3, 4, 6];

/// Checks that an attribute of that name can be stored.
///
/// # Errors
/// [`Error::Unsupported`] if not; [`Error::Misuse`] for a prefix without a name.
pub fn check_name(name: &[u8]) -> Result<()> {
    let mut prefixes = SETTABLE.into_iter().filter_map(prefix);
    if prefixes.any(|prefix| prefix.ends_with(b".") && prefix == name) {
        return Err(Error::Misuse("an extended attribute needs a name behind its prefix"));
    }
    match split_name(name) {
        Some(_) => Ok(()),
        None => Err(Error::Unsupported {
            feature: format!("extended attribute {}", name.escape_ascii()),
        }),
    }
}

/// Returns the name index and suffix of a name; `None` if the name cannot be stored.
fn split_name(name: &[u8]) -> Option<(u8, &[u8])> {
    let found = SETTABLE.into_iter().find_map(|number| {
        let prefix = prefix(number)?;
        let suffix = name.strip_prefix(prefix)?;
        (prefix.ends_with(b".") != suffix.is_empty()).then_some((number, suffix))
    });
    found.filter(|(_, suffix)| suffix.len() <= 255)
}

/// Precondition for setting an extended attribute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XattrSet {
    /// No precondition.
    Any,
    /// The attribute must not exist.
    Create,
    /// The attribute must exist.
    Replace,
}

/// An attribute to write: name index and suffix, and the stored value.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NewXattr {
    // Field order gives the kernel's order of entries in a block.
    number: u8,
    suffix_bytes: usize,
    suffix: Vec<u8>,
    /// Empty if the value is in an EA inode.
    value: Vec<u8>,
    ea_inode: Option<EaInodeRef>,
}

impl NewXattr {
    /// Creates the attribute `name` with `value` in the form of Linux's `setxattr`; `None` if the
    /// name cannot be stored.
    ///
    /// # Errors
    /// [`Error::Misuse`] for an invalid access control list.
    pub fn new(name: &[u8], value: &[u8]) -> Result<Option<Self>> {
        let Some((number, suffix)) = split_name(name) else { return Ok(None) };
        let value = match number {
            2 | 3 => super::acl::to_disk(value)?,
            _ => value.to_vec(),
        };
        let (suffix_bytes, suffix) = (suffix.len(), suffix.to_vec());
        Ok(Some(Self { number, suffix_bytes, suffix, value, ea_inode: None }))
    }

    /// Returns true for an access control list.
    pub fn is_acl(&self) -> bool {
        matches!(self.number, 2 | 3)
    }

    /// Creates the attribute for inline data beyond `i_block`.
    pub fn from_inline_data(value: &[u8]) -> Self {
        let suffix = b"data".to_vec();
        let value = value.to_vec();
        Self { number: 7, suffix_bytes: suffix.len(), suffix, value, ea_inode: None }
    }

    /// Returns the EA inode of the value, if any.
    pub fn ea_inode(&self) -> Option<EaInodeRef> {
        self.ea_inode
    }

    /// Returns the value bytes stored in the list.
    pub fn value(&self) -> &[u8] {
        &self.value
    }

    /// Returns the attribute with its value, which has this hash, moved to the EA inode `inode`.
    pub fn with_ea_inode(&self, inode: InodeNumber, value_hash: u32) -> Self {
        let len = u32::try_from(self.value.len()).unwrap_or(u32::MAX);
        let hash = self.name_hash().rotate_left(16) ^ value_hash;
        let ea_inode = Some(EaInodeRef { inode, len, hash });
        Self { value: Vec::new(), ea_inode, ..self.clone() }
    }

    /// Returns the full name; `None` for a hidden one.
    pub fn name(&self) -> Option<Vec<u8>> {
        Some([prefix(self.number)?, &self.suffix].concat())
    }

    /// Returns the value in the form of Linux's `getxattr`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for an invalid access control list.
    pub fn linux_value(&self) -> Result<Vec<u8>> {
        match self.number {
            2 | 3 => super::acl::to_linux(&self.value),
            _ => Ok(self.value.clone()),
        }
    }

    /// Returns true if the other attribute has the same name.
    pub fn same_name(&self, other: &Self) -> bool {
        (self.number, &self.suffix) == (other.number, &other.suffix)
    }

    /// Returns true for inline data, which must stay in the inode.
    pub fn is_inline_data(&self) -> bool {
        (self.number, self.suffix.as_slice()) == (7, b"data")
    }

    fn entry_bytes(&self) -> usize {
        ENTRY_BYTES.saturating_add(self.suffix_bytes).next_multiple_of(4)
    }

    /// Returns the bytes used in a list.
    pub fn entry_and_value_bytes(&self) -> usize {
        self.entry_bytes().saturating_add(self.value.len().next_multiple_of(4))
    }

    fn name_hash(&self) -> u32 {
        self.suffix.iter().fold(0u32, |sum, byte| sum.rotate_left(5) ^ u32::from(*byte))
    }

    /// Returns the hash over name and value for entries of a block.
    fn hash(&self) -> u32 {
        if let Some(outside) = self.ea_inode {
            return outside.hash;
        }
        self.value.chunks(4).fold(self.name_hash(), |sum, chunk| {
            let mut word = [0; 4];
            for (to, from) in word.iter_mut().zip(chunk) {
                *to = *from;
            }
            sum.rotate_left(16) ^ u32::from_le_bytes(word)
        })
    }
}

/// Returns the capacity of an xattr block for entries and values, without the four end zeros.
pub fn block_capacity(block_bytes: u32) -> usize {
    crate::units::saturating_usize(block_bytes.into())
        .saturating_sub(BLOCK_HEAD_BYTES)
        .saturating_sub(4)
}

/// Returns the capacity behind the fields of an inode for entries and values.
pub fn inode_capacity(inode_bytes: u32) -> usize {
    let fields = 128usize.saturating_add(usize::from(super::inode::EXTRA_BYTES));
    crate::units::saturating_usize(inode_bytes.into()).saturating_sub(fields).saturating_sub(8)
}

/// Builds an xattr block shared by `owners` inodes; the attributes must fit.
pub fn encode_block(attributes: &[NewXattr], block_bytes: u32, owners: u32) -> Vec<u8> {
    let len = crate::units::saturating_usize(block_bytes.into());
    let hashes: Vec<u32> = attributes.iter().map(NewXattr::hash).collect();
    let all = match hashes.contains(&0) {
        true => 0,
        false => hashes.iter().fold(0u32, |sum, hash| sum.rotate_left(16) ^ hash),
    };
    let mut block: Vec<u8> =
        [MAGIC, owners, 1, all, 0, 0, 0, 0].into_iter().flat_map(u32::to_le_bytes).collect();
    block.extend(encode_entries(
        attributes,
        &hashes,
        len.saturating_sub(BLOCK_HEAD_BYTES),
        BLOCK_HEAD_BYTES,
    ));
    block
}

/// Builds the list behind the fields of an inode; the attributes must fit.
pub fn encode_body(attributes: &[NewXattr], inode_bytes: u32) -> Vec<u8> {
    let none = vec![0; attributes.len()];
    encode_entries(attributes, &none, inode_capacity(inode_bytes).saturating_add(4), 0)
}

/// Builds a list of `room` bytes in an inode; the attributes must fit.
pub fn encode_list(attributes: &[NewXattr], room: usize) -> Vec<u8> {
    encode_entries(attributes, &vec![0; attributes.len()], room, 0)
}

/// Encodes entries from the front and values from the end of `len` bytes; `base` is their start in
/// the buffer that value offsets count from.
fn encode_entries(attributes: &[NewXattr], hashes: &[u32], len: usize, base: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    let mut end = len;
    let mut values: Vec<(usize, &[u8])> = Vec::new();
    for (attribute, hash) in attributes.iter().zip(hashes) {
        let NewXattr { number, suffix_bytes, suffix, value, ea_inode } = attribute;
        // An entry of an EA inode always has a hash.
        let (inode, len, hash) = match ea_inode {
            Some(ea_inode) => (ea_inode.inode.0, ea_inode.len, ea_inode.hash),
            None => (0, u32::try_from(value.len()).unwrap_or(0), *hash),
        };
        end = end.saturating_sub(value.len().next_multiple_of(4));
        let at = if value.is_empty() { 0 } else { base.saturating_add(end) };
        values.push((end, value));
        let start = bytes.len();
        bytes.extend([u8::try_from(*suffix_bytes).unwrap_or(0), *number]);
        bytes.extend(u16::try_from(at).unwrap_or(0).to_le_bytes());
        [inode, len, hash].iter().for_each(|field| bytes.extend(field.to_le_bytes()));
        bytes.extend(suffix);
        bytes.resize(start.saturating_add(attribute.entry_bytes()), 0);
    }
    bytes.resize(len, 0);
    for (at, value) in values {
        if let Some(room) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..value.len())) {
            room.copy_from_slice(value);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_is_read_up_to_damage() {
        let mut body = vec![0; 96];
        body[0..4].copy_from_slice(&[3, 1, 90, 0]);
        body[8] = 5;
        body[16..19].copy_from_slice(b"abc");
        body[90..95].copy_from_slice(b"value");
        body[20..24].copy_from_slice(&[200, 1, 0, 0]);
        let found: Vec<_> = XattrList::from_inode(&body).collect();
        assert_eq!(found.len(), 2);
        let first = found[0].as_ref().unwrap();
        assert!(first.has_name(b"user.abc") && !first.has_name(b"user.ab"));
        assert_eq!(first.value().unwrap(), b"value");
        assert!(found[1].is_err());
    }

    #[test]
    fn encoded_lists_are_read_back() {
        let new = |name: &[u8], value: &[u8]| NewXattr::new(name, value).unwrap().unwrap();
        let mut all =
            vec![new(b"user.b", b"12345"), new(b"user.empty", b""), new(b"security.x", b"v")];
        all.sort();
        let block = encode_block(&all, 1024, 3);
        let body = encode_body(&all, 256);
        assert_eq!((block.len(), body.len()), (1024, 256 - 128 - 32 - 4));
        for list in [XattrList::from_block(&block).unwrap(), XattrList::from_inode(&body)] {
            let found: Vec<_> = list
                .map(|it| it.unwrap())
                .map(|it| (it.name(), it.value().unwrap().to_vec()))
                .collect();
            assert_eq!(found.len(), 3);
            assert!(found.contains(&(b"user.b".to_vec(), b"12345".to_vec())));
            assert!(found.contains(&(b"user.empty".to_vec(), vec![])));
        }
        assert_eq!(NewXattr::new(b"btrfs.x", b"").unwrap(), None);
        assert_eq!(NewXattr::new(b"user.", b"").unwrap(), None);
        for name in [&b"system.other"[..], b"system.data", b"system.richacl", b"system."] {
            assert_eq!(NewXattr::new(name, b"").unwrap(), None);
            assert!(matches!(check_name(name), Err(Error::Unsupported { .. })));
        }
        assert!(check_name(b"system.posix_acl_access").is_ok());
        assert!(matches!(check_name(b"user."), Err(Error::Misuse(_))));
        assert!(NewXattr::new(b"system.posix_acl_access", b"").is_err());
    }
}
