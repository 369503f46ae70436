//! Sequential reading of directories.

use std::sync::atomic::Ordering;

use super::name_query::{NameDisplay, NameQuery};
use super::{Cookie, DirDamage, Entry, is_dot_or_dot_dot};
use crate::format::dirent::Dirents;
use crate::format::inode::Inode;
use crate::reader::VolumeReader;
use crate::{Error, FileBlock, InodeNumber, Result};

/// Searches all blocks, beginning with the block of the last hit: programs look names up in the
/// order of a listing.
pub(super) fn find_linear(
    volume: &VolumeReader,
    dir: &Inode,
    wanted: &NameQuery<'_>,
) -> Result<InodeNumber> {
    let blocks = volume.directory_blocks(dir);
    let hint = dir.lookup_hint.load(Ordering::Relaxed).min(blocks);
    // `.` and `..` are in the first block, if anywhere.
    let start = if matches!(wanted.name(), b"." | b"..") { 0 } else { hint };
    let (mut second, mut damage) = (None, None);
    for nth in (start..blocks).chain(0..start) {
        match find_in_block(volume, dir, FileBlock(nth), wanted, &mut second) {
            Ok(Some(inode)) => {
                dir.lookup_hint.store(nth, Ordering::Relaxed);
                return Ok(inode);
            }
            Ok(None) => {}
            Err(Error::Corrupt { what, inode, block }) => {
                damage.get_or_insert(Error::Corrupt { what, inode, block });
            }
            Err(other) => {
                damage = Some(other);
            }
        }
    }
    second.ok_or(damage.unwrap_or(Error::NotFound))
}

/// Finds a name in one block, as [`NameQuery::find_in`]. Damage counts only if the name is not
/// found.
pub(super) fn find_in_block(
    volume: &VolumeReader,
    dir: &Inode,
    nth: FileBlock,
    wanted: &NameQuery<'_>,
    second: &mut Option<InodeNumber>,
) -> Result<Option<InodeNumber>> {
    let Some(block) = volume.directory_block(dir, nth)? else { return Ok(None) };
    let found = wanted.find_in(volume, dir, &block, second);
    found.map_err(|error| volume.with_location(dir, nth, error))
}

/// See [`crate::Volume::entries`]. A cookie is the byte offset of an entry; one between two entries
/// continues with the second.
pub(super) fn enumerate(
    volume: &VolumeReader,
    dir: &Inode,
    from: Cookie,
    dots: bool,
    mut visit: impl FnMut(std::result::Result<Entry<'_>, DirDamage>) -> bool,
) -> Result<()> {
    let names = NameDisplay::for_directory(volume, dir);
    let (first, skip) = volume.cookie_position(from);
    let mut skip = skip;
    for nth in (first.0..volume.directory_blocks(dir)).map(FileBlock) {
        let skip = std::mem::take(&mut skip);
        let next_block = volume.cookie(nth.offset(1), 0);
        let block = match volume.directory_block(dir, nth) {
            Ok(Some(block)) => block,
            Ok(None) => continue,
            Err(error) => {
                if !visit(Err(DirDamage { error, next: next_block })) {
                    return Ok(());
                }
                continue;
            }
        };
        let mut entries = Dirents::of(&block, &volume.super_).allow_any_bytes(dir.is_encrypted());
        while let Some(entry) = entries.next() {
            let next = volume.cookie(nth, entries.position());
            let wanted = match entry {
                Ok(entry) if entry.at < skip || (is_dot_or_dot_dot(&entry) && !dots) => true,
                Ok(entry) => {
                    let (inode, kind) = (entry.inode, entry.kind);
                    let name = &names.display_name(&block, &entry);
                    visit(Ok(Entry { name, inode, kind, next }))
                }
                Err(_) if entries.position() <= skip => true,
                Err(error) => {
                    let error = volume.with_location(dir, nth, error);
                    visit(Err(DirDamage { error, next }))
                }
            };
            if !wanted {
                return Ok(());
            }
        }
    }
    Ok(())
}
