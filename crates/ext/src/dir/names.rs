//! What the names of a directory are shown as, and which of them is meant by a name.
//!
//! | directory | shown as | meant by |
//! |---|---|---|
//! | plain | it is | the same bytes |
//! | casefold | it is | the same bytes, or else what folds to the same |
//! | encrypt | a name without a key | that, whatever the directory folds |

use std::borrow::Cow;

use super::is_dots;
use crate::format::casefold;
use crate::format::dirent::{Dirent, Dirents, HEAD_BYTES};
use crate::format::features::{Compatible, Incompatible};
use crate::format::hash::Hash;
use crate::format::htree::Root;
use crate::format::inode::{Inode, flags};
use crate::format::le32;
use crate::format::nokey::{self, NoKeyName};
use crate::volume::Volume;
use crate::{Error, FileBlock, InodeNumber, Result};

/// How the names of a directory are shown.
pub(crate) enum Names {
    /// As they are.
    AsTheyAre,
    /// As names without a key, with these hashes.
    NoKey(Hashes),
}

/// Which hashes a name without a key says: as the kernel, which shows those that it has at hand.
pub(crate) enum Hashes {
    /// None.
    Zero,
    /// Those of the ciphertext.
    Of(Hash),
    /// Those behind the name in its entry: only who has the key can compute them.
    InEntry,
}

impl Names {
    /// How the names of `dir` are shown.
    pub(crate) fn of(volume: &Volume, dir: &Inode) -> Self {
        match dir.is_encrypted() {
            true => Self::NoKey(hashes(volume, dir)),
            false => Self::AsTheyAre,
        }
    }

    /// What an entry of `block` is shown as.
    pub(crate) fn shown<'a>(&self, block: &[u8], entry: &Dirent<'a>) -> Cow<'a, [u8]> {
        let hashes = match self {
            Self::NoKey(_) if is_dots(entry) => return Cow::Borrowed(entry.name),
            Self::AsTheyAre => return Cow::Borrowed(entry.name),
            Self::NoKey(Hashes::Zero) => (0, 0),
            Self::NoKey(Hashes::Of(hash)) => hash.pair(entry.name),
            Self::NoKey(Hashes::InEntry) => in_entry(block, entry).unwrap_or((0, 0)),
        };
        Cow::Owned(nokey::shown(hashes, entry.name))
    }
}

/// The kernel reads a directory by its hashes where it has a tree or could have been one of a
/// single block.
fn hashes(volume: &Volume, dir: &Inode) -> Hashes {
    let super_ = &volume.super_;
    let has_tree = volume.has_tree(dir);
    let small = dir.is_inline() || volume.directory_blocks(dir) == 1;
    if !super_.compatible.contains(Compatible::DIR_INDEX) || !(has_tree || small) {
        return Hashes::Zero;
    }
    if is_folded(volume, dir) {
        return Hashes::InEntry;
    }
    let (unsigned, seed) = (super_.hash_unsigned, super_.hash_seed);
    let hash = if has_tree {
        let first = volume.directory_block(dir, FileBlock(0)).ok().flatten();
        first.and_then(|block| Some(Root::check(&block, unsigned, seed).ok()?.0.hash))
    } else {
        Hash::of_version(super_.default_hash_version, unsigned, seed)
    };
    hash.map_or(Hashes::Zero, Hashes::Of)
}

/// The two hashes behind a name that is folded and encrypted.
fn in_entry(block: &[u8], entry: &Dirent<'_>) -> Option<(u32, u32)> {
    let at = entry.name.len().checked_add(HEAD_BYTES)?.checked_next_multiple_of(4)?;
    let record = block.get(entry.at..entry.next)?;
    Some((le32(record, at)?, le32(record, at.checked_add(4)?)?))
}

/// Whether the names of `dir` ignore case.
pub(crate) fn is_folded(volume: &Volume, dir: &Inode) -> bool {
    volume.super_.incompatible.contains(Incompatible::CASEFOLD) && dir.flags & flags::CASEFOLD != 0
}

/// What the tree of a directory hashes instead of a name.
pub(crate) fn hashed_of(folds: bool, name: &[u8]) -> Cow<'_, [u8]> {
    match folds.then(|| casefold::folded(name)).flatten() {
        Some(folded) => Cow::Owned(folded),
        None => Cow::Borrowed(name),
    }
}

/// A name that is looked for in one directory.
pub(crate) struct Wanted<'a> {
    name: &'a [u8],
    how: How,
}

enum How {
    Exact,
    Folded(Vec<u8>),
    NoKey(NoKeyName),
}

impl<'a> Wanted<'a> {
    /// What `name` means in `dir`.
    ///
    /// # Errors
    /// [`Error::NotFound`] for what no name without a key looks like; [`Error::Misuse`] for a
    /// name that is no text where the volume has none but such.
    pub(crate) fn of(volume: &Volume, dir: &Inode, name: &'a [u8]) -> Result<Self> {
        let how = match name {
            b"." | b".." => How::Exact,
            _ if dir.is_encrypted() => How::NoKey(NoKeyName::read(name).ok_or(Error::NotFound)?),
            _ if is_folded(volume, dir) => match casefold::folded(name) {
                Some(folded) => How::Folded(folded),
                None if volume.super_.encoding.1 & casefold::FLAG_STRICT != 0 => {
                    return Err(Error::Misuse("a name that is not UTF-8, as the volume demands"));
                }
                None => How::Exact,
            },
            _ => How::Exact,
        };
        Ok(Self { name, how })
    }

    /// The name, as it was asked for.
    pub(crate) const fn name(&self) -> &'a [u8] {
        self.name
    }

    /// What a hash tree hashes; `None` if the name does not say.
    pub(crate) fn hashed(&self) -> Option<&[u8]> {
        match &self.how {
            How::Exact => Some(self.name),
            How::Folded(folded) => Some(folded),
            How::NoKey(_) => None,
        }
    }

    /// Whether a name may also be where its hash does not lead.
    pub(crate) fn may_be_anywhere(&self, volume: &Volume) -> bool {
        // Other tables than today's may have folded it when it was hashed.
        matches!(self.how, How::Folded(_))
            && volume.super_.encoding.1 & casefold::FLAG_BY_HASH_ONLY == 0
    }

    /// Looks for it among the entries of one block or part. The first that is not the same but is
    /// meant, too, is left in `second`.
    ///
    /// # Errors
    /// Damage, if it is not there.
    pub(crate) fn find_in(
        &self,
        volume: &Volume,
        dir: &Inode,
        block: &[u8],
        second: &mut Option<InodeNumber>,
    ) -> Result<Option<InodeNumber>> {
        let mut damage = None;
        for entry in Dirents::of(block, &volume.super_).of_any_bytes(dir.is_encrypted()) {
            match entry {
                Ok(entry) if self.is(entry.name) => return Ok(Some(entry.inode)),
                Ok(entry) if second.is_none() && self.folds_to(entry.name) => {
                    *second = Some(entry.inode);
                }
                Ok(_) => {}
                Err(error) => damage = Some(error),
            }
        }
        damage.map_or(Ok(None), Err)
    }

    /// Whether other names than the very same are meant, too.
    pub(crate) const fn folds(&self) -> bool {
        matches!(self.how, How::Folded(_))
    }

    /// Whether this very name is on disk.
    pub(crate) fn is(&self, on_disk: &[u8]) -> bool {
        match &self.how {
            How::Exact | How::Folded(_) => self.name == on_disk,
            How::NoKey(name) => name.is(on_disk),
        }
    }

    /// Whether a name on disk folds to the same.
    pub(crate) fn folds_to(&self, on_disk: &[u8]) -> bool {
        let How::Folded(folded) = &self.how else { return false };
        if on_disk.is_ascii() {
            return folded.eq_ignore_ascii_case(on_disk);
        }
        casefold::folded(on_disk).is_some_and(|other| *folded == other)
    }
}
