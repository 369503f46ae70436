//! Contents of files: copying to new blocks, with inode numbers replaced.

use draconis_types::FileType;

use super::VolumeRewrite;
use super::directories::DirectoryConversion;
use super::maps::MovedRun;
use crate::blocks::role::Role;
use crate::format::inode::Inode;
use crate::format::orphan_file;
use crate::offline::Result;
use crate::{FileId, FsBlock};

/// Bytes of one copy.
const COPY_BYTES: u64 = 1 << 20;

impl VolumeRewrite<'_> {
    /// Copies the moved blocks of a file, and replaces inode numbers in them. For a directory that
    /// becomes linear, returns its additional blocks.
    pub(super) fn move_contents(
        &mut self,
        node: &Inode,
        file: FileId,
        pieces: &[MovedRun],
    ) -> Result<Option<Vec<MovedRun>>> {
        if self.old.super_.quotas.contains(&node.number.0) {
            self.quota_files.insert(node.number.0, (node.size_bytes, pieces.to_vec()));
        }
        if node.kind == FileType::Directory
            && self.directory_conversion != DirectoryConversion::default()
        {
            return self.convert_directory(node, file, pieces);
        }
        let is_changed = !self.renumbered.is_empty() || self.rewrites_checksums;
        if node.kind == FileType::Directory && is_changed {
            self.rewrite_blocks(Role::Directory(node.file_id()), Role::Directory(file), pieces)?;
            return Ok(None);
        }
        if self.old.super_.orphan_file == Some(node.number) {
            self.rewrite_blocks(Role::OrphanFile(node.file_id()), Role::OrphanFile(file), pieces)?;
            return Ok(None);
        }
        for piece in pieces.iter().filter(|it| it.old != it.new && !it.is_unwritten) {
            self.copy_run(piece)?;
        }
        Ok(None)
    }

    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn copy_run(&mut self, piece: &MovedRun) -> Result<()> {
        if self.redo.is_dry_run() {
            return Ok(());
        }
        let block_bytes = u64::from(self.old.super_.block_bytes);
        let step = (COPY_BYTES / block_bytes).max(1);
        let mut at = 0;
        while at < u64::from(piece.blocks) {
            let count = step.min(u64::from(piece.blocks).saturating_sub(at));
            let bytes = self.redo.read_old(FsBlock(piece.old.saturating_add(at)), count)?;
            self.redo.write_free_blocks(FsBlock(piece.new.saturating_add(at)), &bytes)?;
            (self.progress)(count);
            at = at.saturating_add(count);
        }
        Ok(())
    }

    /// Rewrites blocks with checksums.
    fn rewrite_blocks(
        &mut self,
        old_role: Role,
        new_role: Role,
        pieces: &[MovedRun],
    ) -> Result<()> {
        for piece in pieces {
            for nth in 0..u64::from(piece.blocks) {
                let was = self.read(old_role, FsBlock(piece.old.saturating_add(nth)))?;
                let mut bytes = was.clone();
                if let Role::Directory(dir) = old_role {
                    let inode = crate::InodeNumber(dir.inode);
                    self.renumber_dirents(&mut bytes, inode)?;
                }
                if matches!(old_role, Role::OrphanFile(_)) {
                    // Without checksums e2fsck expects none.
                    orphan_file::clear_checksum(&mut bytes);
                }
                self.write(
                    new_role,
                    piece.old.saturating_add(nth),
                    piece.new.saturating_add(nth),
                    bytes,
                    &was,
                )?;
                if piece.old != piece.new {
                    (self.progress)(1);
                }
            }
        }
        Ok(())
    }
}
