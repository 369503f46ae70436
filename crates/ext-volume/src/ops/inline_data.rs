//! Conversion of inline files and directories to blocks, before they change.
//!
//! ```text
//!   inode | data     | xattrs + the rest of the data     |
//!              └──────────────┬───────────────┘
//!   inode | map ──▶ block     ▼
//!                   | data, or `.` `..` and entries   |
//! ```
//! Law 1: a conversion moves all inline data, which fits one block, with the first change. Xattrs
//! in the inode stay in place.
//! Law 2: names are removed and retargeted inline: that needs no space.

use draconis_types::FileType;

use crate::blocks::data::SharedBytes;
use crate::format::dirent::{DirBlockBuilder, Dirents};
use crate::format::features::Incompatible;
use crate::format::inline::InlineData;
use crate::format::inode::{Inode, POINTERS, flags};
use crate::format::xattr::{self, edit};
use crate::map::edit::AllocationPolicy;
use crate::map::extents::empty_root;
use crate::transaction::Transaction;
use crate::units::saturating_usize;
use crate::{Error, FsBlock, InodeNumber, Result};

impl Transaction<'_> {
    /// Reads the inline data of an inode.
    pub(crate) fn read_inline(&self, inode: &Inode) -> Result<InlineData> {
        self.read_slot(inode.number, |_| ())?;
        self.volume.load_inline_data(inode)
    }

    /// Converts an inline file: moves its first `keep` bytes to a block and drops the rest. Returns
    /// the converted file.
    pub(crate) fn convert_inline_file(
        &mut self,
        inode: &Inode,
        keep: u64,
    ) -> Result<Option<std::sync::Arc<Inode>>> {
        if !inode.is_inline() {
            return Ok(None);
        }
        let inside = self.read_inline(inode)?;
        let len = inode.size_bytes.min(keep).min(inside.len() as u64);
        let mut bytes = vec![0; saturating_usize(self.volume.super_.block_bytes.into())];
        let part =
            bytes.get_mut(..saturating_usize(len)).ok_or(Error::corrupt("inline data: length"))?;
        inside.read(0, part);
        if len > 0 {
            let at = self.allocate_first_block(inode)?;
            self.put_contents(at, &SharedBytes::from_owned_bytes(bytes.into_boxed_slice()));
        } else {
            self.discard_inline_data(inode)?;
        }
        self.invalidate_contents(inode.number, 0, inode.size_bytes);
        self.node(inode.number).map(Some)
    }

    /// Converts an inline directory to a block.
    pub(crate) fn convert_inline_directory(&mut self, number: InodeNumber) -> Result<()> {
        let dir = self.directory(number)?;
        let inside = self.read_inline(&dir)?;
        let of_dir = |error: Error| error.with_inode(number);
        let mut block = DirBlockBuilder::new(self.dir_block_format());
        block.push(number.0, FileType::Directory, b".");
        block.push(inside.parent().map_err(of_dir)?.0, FileType::Directory, b"..");
        for part in inside.dir_parts() {
            for entry in Dirents::of(part.entries, &self.volume.super_) {
                let entry = entry.map_err(of_dir)?;
                let kind = match entry.kind {
                    Some(kind) => kind,
                    None => self.read_inode_unchecked(entry.inode)?.kind,
                };
                if !block.push(entry.inode.0, kind, entry.name) {
                    return Err(of_dir(Error::corrupt("inline directory: length")));
                }
            }
        }
        let names = block.finish();
        let at = self.allocate_first_block(&dir)?;
        self.put_new_block(at, self.directory_role(number)?, names);
        let block_bytes = self.volume.super_.block_bytes;
        self.change_slot(number, |it| it.set_size(block_bytes.into()))
    }

    /// Replaces inline data by a map with one block; the caller fills the block.
    fn allocate_first_block(&mut self, inode: &Inode) -> Result<FsBlock> {
        let privileged = self.is_privileged(inode.owner().0);
        self.check_free_blocks(1, privileged)?;
        self.discard_inline_data(inode)?;
        let taking = AllocationPolicy { is_append: false, privileged, unwritten: false };
        let all = self.map_blocks(inode.number, 0..1, taking)?;
        all.first().map(|run| run.at).ok_or(Error::NoSpace)
    }

    /// Replaces inline data by an empty map.
    fn discard_inline_data(&mut self, inode: &Inode) -> Result<()> {
        let number = inode.number;
        let all = self.read_slot(number, |it| edit::read_body(it.inline_xattrs()))?;
        let mut all = all.map_err(|error| error.with_inode(number))?;
        all.retain(|attribute| !attribute.is_inline_data());
        let by_extents = self.volume.super_.incompatible.contains(Incompatible::EXTENTS);
        self.change_slot(number, |it| {
            let room = it.xattr_capacity();
            let list = xattr::encode_list(&all, room);
            it.set_inline_xattrs(if all.is_empty() { &[] } else { &list });
            let of_map = if by_extents { flags::EXTENTS } else { 0 };
            it.set_flags(it.flags() & !flags::INLINE_DATA | of_map);
            it.set_pointers(if by_extents { empty_root() } else { [0; POINTERS] });
        })?;
        self.invalidate_map(number, 0, 1);
        Ok(())
    }
}
