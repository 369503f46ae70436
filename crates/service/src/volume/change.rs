//! The changes, fitted to the contracts: from messages to the library's operations.

use draconis_exchange::contract::directory::{
    Create, CreateUnnamed, Link, MakeDirectory, RENAME_EXCHANGE, RENAME_NO_REPLACE,
    RENAME_WHITEOUT, RemoveDirectory, RemoveXattr, Rename, SetAttributes, SetFlags, SetXattr,
    Symlink, Unlink,
};
use draconis_exchange::contract::file::{Reserve, Write};
use draconis_exchange::contract::{
    AttributeChange, Attributes, Kind, Name, Node, Refusal, Reservation, without_privileges,
};
use draconis_exchange::heap::Block;
use draconis_exchange::omission::Omission;
use draconis_ext::{InodeNumber, NewNode, Renaming, Whiteout, XattrSet};

use super::{Durable, PIECE_BYTES, VolumeFile, VolumeTree, inode, refusal};

/// The ACL of new nodes in a directory; where there is one, the umask counts for nothing.
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";
/// Flags of `setxattr`, as Linux numbers them.
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;

impl VolumeTree {
    /// After a change of names: durable, if the options want that.
    fn names_changed(&self) -> Result<(), Refusal> {
        match self.durable {
            Durable::OnRequest => Ok(()),
            Durable::Names | Durable::All => self.make_durable(),
        }
    }

    /// After any other change.
    fn contents_changed(&self) -> Result<(), Refusal> {
        match self.durable {
            Durable::OnRequest | Durable::Names => Ok(()),
            Durable::All => self.make_durable(),
        }
    }

    pub(super) fn make_durable(&self) -> Result<(), Refusal> {
        if self.writing { self.volume.sync().map_err(refusal) } else { Ok(()) }
    }

    pub(super) fn was_read(&self, node: Node) {
        if self.writing
            && let Ok(inode) = inode(node)
        {
            self.volume.touch_access(inode);
        }
    }

    fn make(&self, parent: Node, name: &Name, new: &NewNode<'_>) -> Result<Attributes, Refusal> {
        let parent = inode(parent)?;
        let mut new = *new;
        if self.directory_group {
            new.gid = self.attributes(parent)?.gid;
        }
        let made = self.volume.create(parent, name.as_bytes(), &new).map_err(refusal)?;
        self.names_changed()?;
        self.attributes(made)
    }

    /// The permission bits of a new node: the umask takes some away, unless the directory
    /// has an ACL for that.
    fn permissions_in(&self, parent: Node, mode: u32, umask: u32) -> Result<u32, Refusal> {
        if mode & umask == 0 || Omission::Umask.is_made() {
            return Ok(mode);
        }
        let parent = inode(parent)?;
        let has_acl = self.volume.inode(parent).map_err(refusal)?.has_attributes()
            && self.volume.xattr(parent, DEFAULT_ACL).is_ok();
        Ok(if has_acl { mode } else { mode & !umask })
    }

    pub(super) fn make_node(&self, m: &Create) -> Result<Attributes, Refusal> {
        let kind = Kind::from_mode(m.mode).ok_or(Refusal::Invalid)?;
        if matches!(kind, Kind::Directory | Kind::Symlink) {
            return Err(Refusal::Invalid);
        }
        let mode = self.permissions_in(m.parent, m.mode, m.umask)?;
        let (uid, gid, device) = (m.uid, m.gid, m.device);
        self.make(m.parent, &m.name, &NewNode { kind, mode, uid, gid, device, target: &[] })
    }

    pub(super) fn make_unnamed(&self, m: &CreateUnnamed) -> Result<Attributes, Refusal> {
        let mode = self.permissions_in(m.parent, m.mode, m.umask)?;
        let (kind, uid, gid) = (Kind::File, m.uid, m.gid);
        let new = NewNode { kind, mode, uid, gid, device: (0, 0), target: &[] };
        let made = self.volume.create_unnamed(inode(m.parent)?, &new).map_err(refusal)?;
        self.attributes(made)
    }

    pub(super) fn make_dir(&self, m: &MakeDirectory) -> Result<Attributes, Refusal> {
        let mode = self.permissions_in(m.parent, m.mode, m.umask)?;
        let (kind, uid, gid) = (Kind::Directory, m.uid, m.gid);
        let new = NewNode { kind, mode, uid, gid, device: (0, 0), target: &[] };
        self.make(m.parent, &m.name, &new)
    }

    pub(super) fn make_symlink(&self, m: &Symlink) -> Result<Attributes, Refusal> {
        let target = front_of(&m.target, m.len)?;
        let (kind, mode, uid, gid) = (Kind::Symlink, 0o777, m.uid, m.gid);
        let new = NewNode { kind, mode, uid, gid, device: (0, 0), target: &target };
        self.make(m.parent, &m.name, &new)
    }

    pub(super) fn add_name(&self, m: &Link) -> Result<Attributes, Refusal> {
        let (node, parent) = (inode(m.node)?, inode(m.parent)?);
        self.volume.link(node, parent, m.name.as_bytes()).map_err(refusal)?;
        self.names_changed()?;
        self.attributes(node)
    }

    pub(super) fn drop_name(&self, m: &Unlink) -> Result<(), Refusal> {
        self.volume.unlink(inode(m.parent)?, m.name.as_bytes()).map_err(refusal)?;
        self.names_changed()
    }

    pub(super) fn drop_directory(&self, m: &RemoveDirectory) -> Result<(), Refusal> {
        self.volume.remove_directory(inode(m.parent)?, m.name.as_bytes()).map_err(refusal)?;
        self.names_changed()
    }

    pub(super) fn move_name(&self, m: &Rename) -> Result<(), Refusal> {
        let how = match m.flags & !RENAME_WHITEOUT {
            0 => Renaming::Replace,
            RENAME_NO_REPLACE => Renaming::NoReplace,
            RENAME_EXCHANGE => Renaming::Exchange,
            _ => return Err(Refusal::Invalid),
        };
        let (from, to) = (inode(m.from)?, inode(m.to)?);
        let (name, new_name) = (m.name.as_bytes(), m.new_name.as_bytes());
        let plain = m.flags & RENAME_WHITEOUT == 0 || Omission::Whiteout.is_made();
        let renamed = if plain {
            self.volume.rename(from, name, to, new_name, how)
        } else {
            let whiteout = Whiteout { uid: m.uid, gid: m.gid };
            self.volume.rename_with_whiteout(from, name, to, new_name, how, whiteout)
        };
        renamed.map_err(refusal)?;
        self.names_changed()
    }

    pub(super) fn change_attributes(&self, m: &SetAttributes) -> Result<Attributes, Refusal> {
        let node = inode(m.node)?;
        let mut change = m.change;
        if change.clear_privileges.is_some() {
            let now = self.volume.attributes(node).map_err(refusal)?;
            let mode = change.mode.unwrap_or(now.mode);
            let left = without_privileges(mode, now.gid, change.clear_privileges);
            if now.kind != Kind::Directory && left != mode {
                change.mode = Some(left);
            }
        }
        let changed = self.volume.set_attributes(node, &change).map_err(refusal)?;
        self.contents_changed()?;
        Ok(Attributes { node: Node(node.0.into()), ..changed })
    }

    pub(super) fn change_flags(&self, m: &SetFlags) -> Result<Attributes, Refusal> {
        let node = inode(m.node)?;
        self.volume.set_flags(node, m.flags).map_err(refusal)?;
        self.contents_changed()?;
        self.attributes(node)
    }

    pub(super) fn change_xattr(&self, m: &SetXattr) -> Result<(), Refusal> {
        let how = match m.flags {
            0 => XattrSet::Any,
            XATTR_CREATE if Omission::NewXattr.is_made() => XattrSet::Any,
            XATTR_CREATE => XattrSet::Create,
            XATTR_REPLACE => XattrSet::Replace,
            _ => return Err(Refusal::Invalid),
        };
        let value = front_of(&m.value, m.len)?;
        let (node, name) = (inode(m.node)?, m.name.as_bytes());
        let clear_setgid = m.clear_setgid && !Omission::ListSetgid.is_made();
        self.volume.set_xattr(node, name, &value, how, clear_setgid).map_err(refusal)?;
        self.contents_changed()
    }

    pub(super) fn drop_xattr(&self, m: &RemoveXattr) -> Result<(), Refusal> {
        self.volume.remove_xattr(inode(m.node)?, m.name.as_bytes()).map_err(refusal)?;
        self.contents_changed()
    }
}

impl VolumeFile<'_> {
    pub(super) fn write_from(&self, m: &Write) -> Result<u32, Refusal> {
        if !m.fits() {
            return Err(Refusal::Invalid);
        }
        let node = inode(self.node)?;
        if m.clear_privileges {
            self.clear_privileges(node)?;
        }
        let (from, len) = (m.buffer_offset as usize, m.len as usize);
        let written = match m.buffer.bytes().and_then(|bytes| bytes.get(from..from + len)) {
            Some(bytes) => self.tree.volume.write(node, m.offset, bytes).map_err(refusal)?,
            // Shared memory cannot be lent to the library: by way of a private piece.
            None => self.write_pieces(node, m)?,
        };
        self.tree.contents_changed()?;
        Ok(written as u32)
    }

    fn write_pieces(&self, node: InodeNumber, m: &Write) -> Result<usize, Refusal> {
        let len = m.len as usize;
        let mut piece = vec![0; len.min(PIECE_BYTES)];
        let mut done = 0;
        while done < len {
            let want = (len - done).min(piece.len());
            m.buffer.copy_out(m.buffer_offset as usize + done, &mut piece[..want]);
            let at = m.offset + done as u64;
            match self.tree.volume.write(node, at, &piece[..want]) {
                Ok(written) => done += written,
                // What was written before is told first.
                Err(_) if done > 0 => break,
                Err(error) => return Err(refusal(error)),
            }
            if !done.is_multiple_of(PIECE_BYTES) {
                break;
            }
        }
        Ok(done)
    }

    fn clear_privileges(&self, node: InodeNumber) -> Result<(), Refusal> {
        let volume = &self.tree.volume;
        let now = volume.attributes(node).map_err(refusal)?;
        let left = without_privileges(now.mode, now.gid, None);
        if left == now.mode {
            return Ok(());
        }
        let change = AttributeChange { mode: Some(left), ..AttributeChange::default() };
        volume.set_attributes(node, &change).map(drop).map_err(refusal)
    }

    pub(super) fn change_space(&self, m: &Reserve) -> Result<(), Refusal> {
        let how = match m.how {
            Reservation::Extend => draconis_ext::Reserve::Extend,
            Reservation::KeepSize => draconis_ext::Reserve::KeepSize,
            Reservation::PunchHole => draconis_ext::Reserve::PunchHole,
            Reservation::ZeroRange { keep_size } => draconis_ext::Reserve::ZeroRange { keep_size },
        };
        let node = inode(self.node)?;
        self.tree.volume.reserve(node, m.offset, m.len, how).map_err(refusal)?;
        self.tree.contents_changed()
    }

    pub(super) fn make_durable(&self, data_only: bool) -> Result<(), Refusal> {
        if !self.tree.writing {
            return Ok(());
        }
        self.tree.volume.sync_inode(inode(self.node)?, data_only).map_err(refusal)
    }
}

/// The first `len` bytes of a block.
fn front_of(block: &Block, len: u32) -> Result<Vec<u8>, Refusal> {
    let len = len as usize;
    if len > block.len() {
        return Err(Refusal::Invalid);
    }
    let mut bytes = vec![0; len];
    block.copy_out(0, &mut bytes);
    Ok(bytes)
}
