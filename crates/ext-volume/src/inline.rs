//! Reading of inline files and directories.
//!
//! Law: a cookie in an inline directory is a byte offset, as in any other. `.` and `..`, which have
//! no entries there, have the cookies 0 and 1, before the first entry at 4.

use draconis_types::FileType;

use crate::blocks::CHUNK_BYTES;
use crate::blocks::data::SharedBytes;
use crate::dir::name_query::{NameDisplay, NameQuery};
use crate::dir::{Cookie, DirDamage, Entry};
use crate::file::Seek;
use crate::format::dirent::Dirents;
use crate::format::inline::{ENTRIES_AT, InlineData};
use crate::format::inode::Inode;
use crate::format::xattr::XattrList;
use crate::reader::VolumeReader;
use crate::units::saturating_usize;
use crate::{Error, InodeNumber, Result};

/// Cookies after `.` and after `..`.
const COOKIE_AFTER_DOT: u64 = 1;
const COOKIE_AFTER_DOT_DOT: u64 = ENTRIES_AT as u64;

impl VolumeReader {
    /// Returns the inline data of an inode.
    pub fn load_inline_data(&self, inode: &Inode) -> Result<InlineData> {
        let body = self.inode_xattr_bytes(inode)?;
        for attribute in body.as_deref().map(XattrList::from_inode).into_iter().flatten() {
            let attribute = attribute.map_err(|error| error.with_inode(inode.number))?;
            if attribute.is_inline_data() {
                let value = attribute.value().map_err(|error| error.with_inode(inode.number))?;
                return Ok(InlineData::new(&inode.pointer_bytes(), value));
            }
        }
        Err(Error::corrupt("inline data: no attribute holds the rest").with_inode(inode.number))
    }

    /// [`VolumeReader::read_contents`] of an inline file.
    pub(crate) fn inline_contents(
        &self,
        inode: &Inode,
        offset: u64,
        len: usize,
    ) -> Result<SharedBytes> {
        inode.check_readable()?;
        let inline = self.load_inline_data(inode)?;
        let left = inode.size_bytes.saturating_sub(offset);
        let to_stop = CHUNK_BYTES.saturating_sub(offset % CHUNK_BYTES);
        let mut bytes = vec![0; saturating_usize(left.min(to_stop)).min(len)];
        inline.read(offset, &mut bytes);
        Ok(SharedBytes::from_owned_bytes(bytes.into_boxed_slice()))
    }

    /// [`crate::Volume::seek`] in an inline file.
    pub(crate) fn inline_seek(&self, inode: &Inode, at: u64, what: Seek) -> Result<Option<u64>> {
        inode.check_readable()?;
        let stored = (self.load_inline_data(inode)?.len() as u64).min(inode.size_bytes);
        Ok(match what {
            Seek::Data => (at < stored).then_some(at),
            Seek::Hole => Some(at.max(stored)),
        })
    }

    /// [`crate::Volume::lookup`] in an inline directory.
    pub(crate) fn find_inline(&self, dir: &Inode, wanted: &NameQuery<'_>) -> Result<InodeNumber> {
        let inline = self.load_inline_data(dir)?;
        match wanted.name() {
            b"." => return Ok(dir.number),
            b".." => return inline.parent().map_err(|error| error.with_inode(dir.number)),
            _ => {}
        }
        let (mut second, mut damage) = (None, None);
        for part in inline.dir_parts() {
            match wanted.find_in(self, dir, part.entries, &mut second) {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => {}
                Err(error) => damage = Some(error.with_inode(dir.number)),
            }
        }
        second.ok_or(damage.unwrap_or(Error::NotFound))
    }

    /// [`crate::Volume::entries`] of an inline directory.
    pub(crate) fn enumerate_inline(
        &self,
        dir: &Inode,
        from: Cookie,
        dots: bool,
        mut visit: impl FnMut(std::result::Result<Entry<'_>, DirDamage>) -> bool,
    ) -> Result<()> {
        let names = NameDisplay::for_directory(self, dir);
        let all = Cookie(u64::MAX);
        let inline = match self.load_inline_data(dir) {
            Ok(inline) => inline,
            Err(error) => {
                visit(Err(DirDamage { error, next: all }));
                return Ok(());
            }
        };
        let parent = inline.parent().map_err(|error| error.with_inode(dir.number));
        let two =
            [(&b"."[..], Ok(dir.number), COOKIE_AFTER_DOT), (b"..", parent, COOKIE_AFTER_DOT_DOT)];
        for (name, inode, next) in two {
            let next = Cookie(next);
            let found = inode
                .map(|inode| Entry { name, inode, kind: Some(FileType::Directory), next })
                .map_err(|error| DirDamage { error, next });
            if dots && from < next && !visit(found) {
                return Ok(());
            }
        }
        for part in inline.dir_parts() {
            let place = |at: usize| Cookie(part.at.saturating_add(at) as u64);
            let mut entries =
                Dirents::of(part.entries, &self.super_).allow_any_bytes(dir.is_encrypted());
            while let Some(entry) = entries.next() {
                let next = place(entries.position());
                if next <= from {
                    continue;
                }
                let goes_on = match entry {
                    Ok(entry) if place(entry.at) < from => true,
                    Ok(entry) => visit(Ok(Entry {
                        name: &names.display_name(part.entries, &entry),
                        inode: entry.inode,
                        kind: entry.kind,
                        next,
                    })),
                    Err(error) => {
                        visit(Err(DirDamage { error: error.with_inode(dir.number), next }))
                    }
                };
                if !goes_on {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}
