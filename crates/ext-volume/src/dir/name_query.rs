//! Display and matching of names.
//!
//! | directory | displayed name | match |
//! |---|---|---|
//! | plain | as stored | equal bytes |
//! | casefold | as stored | equal bytes, or else equal after folding |
//! | encrypt | no-key name | that no-key name, also with casefold |

use std::borrow::Cow;

use super::is_dot_or_dot_dot;
use crate::format::casefold;
use crate::format::dirent::{Dirent, Dirents};
use crate::format::features::{Compatible, Incompatible};
use crate::format::hash::NameHash;
use crate::format::htree::DxRoot;
use crate::format::inode::{Inode, flags};
use crate::format::nokey::{self, NoKeyName};
use crate::reader::VolumeReader;
use crate::{Error, FileBlock, InodeNumber, Result};

/// Display of a directory's names.
pub enum NameDisplay {
    /// Names as stored.
    Plain,
    /// No-key names with these hashes.
    NoKey(NoKeyHashSource),
}

/// Source of the hashes in a no-key name; the same as the kernel's.
pub enum NoKeyHashSource {
    /// No hash.
    Zero,
    /// Hash of the ciphertext.
    Computed(NameHash),
    /// Hashes stored after the name in its entry: computing them needs the key.
    InEntry,
}

impl NameDisplay {
    /// Returns the display of the names of `dir`.
    pub fn for_directory(volume: &VolumeReader, dir: &Inode) -> Self {
        match dir.is_encrypted() {
            true => Self::NoKey(no_key_hash_source(volume, dir)),
            false => Self::Plain,
        }
    }

    /// Returns the displayed name of an entry of `block`.
    pub fn display_name<'a>(&self, block: &[u8], entry: &Dirent<'a>) -> Cow<'a, [u8]> {
        let hashes = match self {
            Self::NoKey(_) if is_dot_or_dot_dot(entry) => return Cow::Borrowed(entry.name),
            Self::Plain => return Cow::Borrowed(entry.name),
            Self::NoKey(NoKeyHashSource::Zero) => (0, 0),
            Self::NoKey(NoKeyHashSource::Computed(hash)) => hash.major_and_minor_hash(entry.name),
            Self::NoKey(NoKeyHashSource::InEntry) => entry.stored_hashes(block).unwrap_or((0, 0)),
        };
        Cow::Owned(nokey::no_key_name(hashes, entry.name))
    }
}

/// Returns the hash source. The kernel hashes names if the directory has a tree, or is a single
/// block that could be one.
fn no_key_hash_source(volume: &VolumeReader, dir: &Inode) -> NoKeyHashSource {
    let super_ = &volume.super_;
    let has_tree = volume.has_htree(dir);
    let small = dir.is_inline() || volume.directory_blocks(dir) == 1;
    if !super_.compatible.contains(Compatible::DIR_INDEX) || !(has_tree || small) {
        return NoKeyHashSource::Zero;
    }
    if is_casefolded(volume, dir) {
        return NoKeyHashSource::InEntry;
    }
    let (unsigned, seed) = (super_.hash_unsigned, super_.hash_seed);
    let hash = if has_tree {
        let first = volume.directory_block(dir, FileBlock(0)).ok().flatten();
        first.and_then(|block| Some(DxRoot::check(&block, unsigned, seed).ok()?.0.hash))
    } else {
        NameHash::of_version(super_.default_hash_version, unsigned, seed)
    };
    hash.map_or(NoKeyHashSource::Zero, NoKeyHashSource::Computed)
}

/// Returns true if the names of `dir` ignore case.
pub(crate) fn is_casefolded(volume: &VolumeReader, dir: &Inode) -> bool {
    volume.super_.incompatible.contains(Incompatible::CASEFOLD) && dir.flags & flags::CASEFOLD != 0
}

/// Returns the hash input of a name.
pub(crate) fn hash_input_of_name(folds: bool, name: &[u8]) -> Cow<'_, [u8]> {
    match folds.then(|| casefold::fold_name(name)).flatten() {
        Some(folded) => Cow::Owned(folded),
        None => Cow::Borrowed(name),
    }
}

/// A name to look up in one directory.
pub struct NameQuery<'a> {
    name: &'a [u8],
    how: NameMatcher,
}

enum NameMatcher {
    Exact,
    Folded(Vec<u8>),
    NoKey(NoKeyName),
}

impl<'a> NameQuery<'a> {
    /// Prepares the lookup of `name` in `dir`.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it is not a valid no-key name; [`Error::Misuse`] for invalid UTF-8 on
    /// a volume with strict encoding.
    pub fn for_name(volume: &VolumeReader, dir: &Inode, name: &'a [u8]) -> Result<Self> {
        let how = match name {
            b"." | b".." => NameMatcher::Exact,
            _ if dir.is_encrypted() => {
                NameMatcher::NoKey(NoKeyName::parse(name).ok_or(Error::NotFound)?)
            }
            _ if is_casefolded(volume, dir) => match casefold::fold_name(name) {
                Some(folded) => NameMatcher::Folded(folded),
                None if volume.super_.encoding.1 & casefold::FLAG_STRICT != 0 => {
                    return Err(Error::Misuse("a name that is not UTF-8, as the volume demands"));
                }
                None => NameMatcher::Exact,
            },
            _ => NameMatcher::Exact,
        };
        Ok(Self { name, how })
    }

    /// Returns the name as given by the caller.
    pub(crate) const fn name(&self) -> &'a [u8] {
        self.name
    }

    /// Returns the hash input; `None` for a no-key name.
    pub(crate) fn hash_input(&self) -> Option<&[u8]> {
        match &self.how {
            NameMatcher::Exact => Some(self.name),
            NameMatcher::Folded(folded) => Some(folded),
            NameMatcher::NoKey(_) => None,
        }
    }

    /// Returns true if an entry may be outside the leaf of its hash.
    pub(crate) fn may_be_misplaced(&self, volume: &VolumeReader) -> bool {
        // An older Unicode version may have folded the name when it was hashed.
        matches!(self.how, NameMatcher::Folded(_))
            && volume.super_.encoding.1 & casefold::FLAG_NO_COMPAT_FALLBACK == 0
    }

    /// Looks the name up in one block or inline part. Stores the first inexact match in `second`.
    ///
    /// # Errors
    /// Damage, if the name is not found.
    pub(crate) fn find_in(
        &self,
        volume: &VolumeReader,
        dir: &Inode,
        block: &[u8],
        second: &mut Option<InodeNumber>,
    ) -> Result<Option<InodeNumber>> {
        let mut damage = None;
        for entry in Dirents::of(block, &volume.super_).allow_any_bytes(dir.is_encrypted()) {
            match entry {
                Ok(entry) if self.matches_exactly(entry.name) => return Ok(Some(entry.inode)),
                Ok(entry) if second.is_none() && self.folds_to(entry.name) => {
                    *second = Some(entry.inode);
                }
                Ok(_) => {}
                Err(error) => damage = Some(error),
            }
        }
        damage.map_or(Ok(None), Err)
    }

    /// Returns true if inexact matches count, too.
    pub(crate) const fn is_case_insensitive(&self) -> bool {
        matches!(self.how, NameMatcher::Folded(_))
    }

    /// Returns true if the stored name matches exactly.
    pub(crate) fn matches_exactly(&self, on_disk: &[u8]) -> bool {
        match &self.how {
            NameMatcher::Exact | NameMatcher::Folded(_) => self.name == on_disk,
            NameMatcher::NoKey(name) => name.matches(on_disk),
        }
    }

    /// Returns true if the stored name folds to the same.
    pub(crate) fn folds_to(&self, on_disk: &[u8]) -> bool {
        let NameMatcher::Folded(folded) = &self.how else { return false };
        if on_disk.is_ascii() {
            return folded.eq_ignore_ascii_case(on_disk);
        }
        casefold::fold_name(on_disk).is_some_and(|other| *folded == other)
    }
}
