//! Editing of attribute lists: parsed completely, changed in memory, and laid out again.
//!
//! ```text
//!   inode | list ─┐                              ┌─▶ inode | list
//!                 ├─▶ read ─▶ set, remove ─▶ lay out
//!   block | list ─┘                              └─▶ block | list
//! ```
//! Law: valid but unknown attributes are preserved byte for byte.

use super::{
    BLOCK_HEAD_BYTES, ENTRY_BYTES, EaInodeRef, MAGIC, NewXattr, XattrSet, block_capacity,
    encode_block, encode_entries, split_name,
};
use crate::{Error, InodeNumber, Result};
use crate::{le16, le32};

/// Attribute lists to write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct XattrLayout {
    /// List behind the fields of the inode, with the length of that area; zeros if empty.
    pub body: Vec<u8>,
    /// True if the inode holds any attribute.
    pub has_inode_xattrs: bool,
    /// Xattr block with one owner, if any attribute needs it.
    pub block: Option<Vec<u8>>,
}

/// Parses the list in an inode, which starts with `body`.
///
/// # Errors
/// [`Error::Corrupt`] for a damaged list, which must not be rewritten.
pub fn read_body(body: &[u8]) -> Result<Vec<NewXattr>> {
    read_entries(body, body)
}

/// Parses the list in an xattr block.
///
/// # Errors
/// [`Error::Corrupt`] if the magic number is wrong or the list is damaged.
pub fn read_block(block: &[u8]) -> Result<Vec<NewXattr>> {
    match (le32(block, 0), le32(block, 8), block.get(BLOCK_HEAD_BYTES..)) {
        (Some(MAGIC), Some(1), Some(entries)) => read_entries(entries, block),
        _ => Err(Error::corrupt("extended attribute block")),
    }
}

fn read_entries(entries: &[u8], values: &[u8]) -> Result<Vec<NewXattr>> {
    let mut list = Vec::new();
    let mut rest = entries;
    // A list may also end with its buffer. Each iteration advances by an entry.
    while le32(rest, 0).is_some_and(|first| first != 0) {
        let attribute = parse_entry(rest, values)
            .ok_or(Error::corrupt("extended attribute: entry or value"))?;
        rest = rest.get(attribute.entry_bytes()..).unwrap_or_default();
        list.push(attribute);
    }
    Ok(list)
}

fn parse_entry(head: &[u8], values: &[u8]) -> Option<NewXattr> {
    let (suffix_bytes, number) = (usize::from(*head.first()?), *head.get(1)?);
    let suffix = head.get(ENTRY_BYTES..)?.get(..suffix_bytes)?.to_vec();
    let (inode, len, hash) = (le32(head, 4)?, le32(head, 8)?, le32(head, 12)?);
    let ea_inode = (inode != 0).then_some(EaInodeRef { inode: InodeNumber(inode), len, hash });
    let value = match (ea_inode, usize::try_from(len).ok()?) {
        (Some(_), _) | (None, 0) => &[],
        (None, len) => values.get(usize::from(le16(head, 2)?)..)?.get(..len)?,
    };
    Some(NewXattr { number, suffix_bytes, suffix, value: value.to_vec(), ea_inode })
}

/// Adds or replaces an attribute.
///
/// # Errors
/// [`Error::Exists`] or [`Error::NoAttribute`] as `how` demands; the list is unchanged.
pub fn set_attribute(list: &mut Vec<NewXattr>, new: NewXattr, how: XattrSet) -> Result<()> {
    match (list.iter_mut().find(|old| old.same_name(&new)), how) {
        (Some(_), XattrSet::Create) => Err(Error::Exists),
        (None, XattrSet::Replace) => Err(Error::NoAttribute),
        (Some(old), _) => {
            *old = new;
            Ok(())
        }
        (None, _) => {
            list.push(new);
            Ok(())
        }
    }
}

/// Removes an attribute by its full name.
///
/// # Errors
/// [`Error::NoAttribute`].
pub fn remove_attribute(list: &mut Vec<NewXattr>, name: &[u8]) -> Result<()> {
    let (number, suffix) = split_name(name).ok_or(Error::NoAttribute)?;
    let before = list.len();
    list.retain(|old| (old.number, old.suffix.as_slice()) != (number, suffix));
    if list.len() == before { Err(Error::NoAttribute) } else { Ok(()) }
}

/// Lays out attributes: inline data first, then the others in order, in the inode list of
/// `body_bytes`. The rest goes to a block. If that fails, the largest go to the inode first.
///
/// # Errors
/// [`Error::NoSpace`] if they do not fit.
pub fn lay_out_attributes(
    attributes: &[NewXattr],
    body_bytes: usize,
    block_bytes: u32,
) -> Result<XattrLayout> {
    let mut in_order: Vec<&NewXattr> = attributes.iter().collect();
    in_order.sort_by_key(|it| !it.is_inline_data());
    let mut by_size = in_order.clone();
    by_size.sort_by_key(|it| (!it.is_inline_data(), std::cmp::Reverse(it.entry_and_value_bytes())));
    let (body, mut block) = split_inode_and_block(&in_order, body_bytes, block_bytes)
        .or_else(|| split_inode_and_block(&by_size, body_bytes, block_bytes))
        .ok_or(Error::NoSpace)?;
    let has_inode_xattrs = !body.is_empty();
    let none = vec![0; body.len()];
    // The kernel's order of entries in a block.
    block.sort();
    Ok(XattrLayout {
        body: encode_entries(&body, &none, body_bytes, 0),
        has_inode_xattrs,
        block: (!block.is_empty()).then(|| encode_block(&block, block_bytes, 1)),
    })
}

/// Splits the list between inode and block; `None` if the block is too small.
fn split_inode_and_block(
    attributes: &[&NewXattr],
    body_bytes: usize,
    block_bytes: u32,
) -> Option<(Vec<NewXattr>, Vec<NewXattr>)> {
    // Four zeros end a list.
    let mut in_body = body_bytes.saturating_sub(4);
    let mut in_block = block_capacity(block_bytes);
    let (mut body, mut block) = (Vec::new(), Vec::new());
    for attribute in attributes {
        let need = attribute.entry_and_value_bytes();
        if let Some(left) = in_body.checked_sub(need) {
            in_body = left;
            body.push((*attribute).clone());
        } else if attribute.is_inline_data() {
            return None;
        } else {
            in_block = in_block.checked_sub(need)?;
            block.push((*attribute).clone());
        }
    }
    Some((body, block))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use draconis_device::Random;

    use super::super::{XattrList, encode_body};
    use super::*;

    type Model = BTreeMap<Vec<u8>, Vec<u8>>;

    fn new(name: &[u8], value: &[u8]) -> NewXattr {
        NewXattr::new(name, value).unwrap().unwrap()
    }

    fn layout_to_model(placed: &XattrLayout) -> Model {
        let mut all: Vec<_> = XattrList::from_inode(&placed.body).map(|it| it.unwrap()).collect();
        if let Some(block) = &placed.block {
            all.extend(XattrList::from_block(block).unwrap().map(|it| it.unwrap()));
        }
        let shown: Model = all.iter().map(|it| (it.name(), it.value().unwrap().to_vec())).collect();
        assert_eq!(shown.len(), all.len(), "none is there twice");
        shown
    }

    fn encode_and_reread(placed: &XattrLayout) -> Vec<NewXattr> {
        let mut list = read_body(&placed.body).unwrap();
        list.extend(placed.block.as_deref().map(|it| read_block(it).unwrap()).unwrap_or_default());
        list
    }

    fn random_below(random: &mut Random, limit: usize) -> usize {
        random.next_below(limit as u64) as usize
    }

    #[test]
    fn random_changes_match_model() {
        for (body_bytes, block_bytes) in [(0, 1024), (92, 1024), (92, 4096), (860, 65536)] {
            let mut random = Random::new(5 + body_bytes as u64);
            let (mut model, mut list) = (Model::new(), Vec::new());
            let (mut full, mut inside, mut outside) = (0, 0, 0);
            for _ in 0..2000 {
                let nth = random_below(&mut random, 12);
                let name = [&b"user."[..], b"trusted.", b"security."][nth % 3].to_vec();
                let name = [name, vec![b'x'; 1 + nth]].concat();
                let (before, model_before) = (list.clone(), model.clone());
                if random_below(&mut random, 4) == 0 {
                    let expected = model.remove(&name).map(drop).ok_or(Error::NoAttribute);
                    assert_eq!(remove_attribute(&mut list, &name), expected);
                } else {
                    let largest =
                        if random_below(&mut random, 3) == 0 { block_bytes / 3 } else { 40 };
                    let value = vec![nth as u8; random_below(&mut random, largest as usize)];
                    let how = [XattrSet::Any, XattrSet::Create, XattrSet::Replace];
                    let how = how[random_below(&mut random, 3)];
                    let there = model.contains_key(&name);
                    let expected = match how {
                        XattrSet::Create if there => Err(Error::Exists),
                        XattrSet::Replace if !there => Err(Error::NoAttribute),
                        _ => Ok(()),
                    };
                    assert_eq!(set_attribute(&mut list, new(&name, &value), how), expected);
                    if expected.is_ok() {
                        model.insert(name, value);
                    }
                }
                match lay_out_attributes(&list, body_bytes, block_bytes) {
                    Ok(placed) => {
                        assert_eq!(layout_to_model(&placed), model);
                        assert_eq!(placed.body.len(), body_bytes);
                        assert_eq!(
                            placed.has_inode_xattrs,
                            placed.body.iter().any(|byte| *byte != 0)
                        );
                        inside += u32::from(placed.has_inode_xattrs);
                        outside += u32::from(placed.block.is_some());
                        list = encode_and_reread(&placed);
                    }
                    Err(error) => {
                        assert_eq!(error, Error::NoSpace);
                        let need: usize = list.iter().map(NewXattr::entry_and_value_bytes).sum();
                        assert!(need > block_capacity(block_bytes));
                        full += 1;
                        (list, model) = (before, model_before);
                    }
                }
            }
            assert!(outside > 100 && (inside > 100 || body_bytes == 0));
            assert!(full > 10 || block_bytes > 4096);
        }
    }

    #[test]
    fn inode_fills_before_block() {
        let small = new(b"user.s", &[1; 8]);
        let placed = lay_out_attributes(std::slice::from_ref(&small), 92, 1024).unwrap();
        assert!(placed.has_inode_xattrs && placed.block.is_none());
        assert_eq!(placed.body, encode_body(std::slice::from_ref(&small), 256));
        // 40 bytes in the inode leave too little for 80 more, and the block holds all but 40.
        let (big, huge) = (new(b"user.b", &[2; 56]), new(b"user.h", &[3; 920]));
        assert_eq!(block_capacity(1024) - huge.entry_and_value_bytes(), 48);
        let placed =
            lay_out_attributes(&[small.clone(), big.clone(), huge.clone()], 92, 1024).unwrap();
        assert_eq!(read_body(&placed.body).unwrap(), [big]);
        assert_eq!(read_block(&placed.block.unwrap()).unwrap(), [huge, small]);
        let none = lay_out_attributes(&[], 92, 1024).unwrap();
        assert_eq!((none.has_inode_xattrs, none.block, none.body), (false, None, vec![0; 92]));
    }

    #[test]
    fn unknown_prefixes_are_kept() {
        let strange = NewXattr {
            number: 9,
            suffix_bytes: 3,
            suffix: b"odd".to_vec(),
            value: b"value".to_vec(),
            ea_inode: None,
        };
        let block = encode_block(std::slice::from_ref(&strange), 1024, 3);
        let mut list = read_block(&block).unwrap();
        set_attribute(&mut list, new(b"user.a", b"1"), XattrSet::Any).unwrap();
        let placed = lay_out_attributes(&list, 0, 1024).unwrap();
        assert_eq!(read_block(&placed.block.unwrap()).unwrap(), [new(b"user.a", b"1"), strange]);
        assert_eq!(remove_attribute(&mut list, b"btrfs.x"), Err(Error::NoAttribute));
        assert_eq!(
            remove_attribute(&mut list, b"system.posix_acl_access"),
            Err(Error::NoAttribute)
        );
    }

    #[test]
    fn ea_inode_entries_are_kept() {
        let moved = new(b"user.a", &[7; 5000]).with_ea_inode(InodeNumber(99), 0x1234_5678);
        assert_eq!(moved.entry_and_value_bytes(), 20);
        let all = [new(b"user.b", b"1"), moved];
        for room in [0, 92] {
            let placed = lay_out_attributes(&all, room, 1024).unwrap();
            let mut list = encode_and_reread(&placed);
            list.sort();
            let outside = list[0].ea_inode().unwrap();
            assert_eq!((outside.inode, outside.len), (InodeNumber(99), 5000));
            let mut sorted = all.to_vec();
            sorted.sort();
            assert_eq!(list, sorted);
        }
    }

    #[test]
    fn damaged_lists_are_refused_without_panic() {
        let body = encode_body(&[new(b"user.a", b"12345"), new(b"user.b", b"6")], 256);
        let mut damaged = body.clone();
        damaged[9] = 0xFF;
        assert!(read_body(&damaged).is_err());
        assert!(read_block(&body).is_err());
        let mut random = Random::new(1);
        for _ in 0..20_000 {
            let mut block =
                encode_block(&[new(b"user.a", b"12345"), new(b"user.b", b"6")], 1024, 1);
            for _ in 0..1 + random_below(&mut random, 5) {
                block[random_below(&mut random, 80)] = random_below(&mut random, 256) as u8;
            }
            block.truncate(1024 - random_below(&mut random, 2) * random_below(&mut random, 1024));
            if let Ok(list) = read_block(&block) {
                let _ = lay_out_attributes(&list, 92, 1024);
            }
        }
    }
}
