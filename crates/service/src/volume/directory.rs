//! The directory contract, served by a volume: maps messages to the library's operations.

use std::collections::HashSet;

use draconis_exchange::contract::directory::{
    Create, CreateTmpfile, DirEntry, DirectoryServer, EntryWriter, Enumerate, GetAttributes,
    GetXattr, Link, ListXattr, Lookup, MakeDirectory, Open, RENAME_EXCHANGE, RENAME_NO_REPLACE,
    RENAME_WHITEOUT, ReadLink, RemoveDirectory, RemoveXattr, Rename, SetAttributes, SetFlags,
    SetXattr, Symlink, SyncVolume, Unlink,
};
use draconis_ext::{Cookie, InodeNumber, NewNode, RenameMode, Volume, Whiteout, XattrSet};
use draconis_types::Block;
use draconis_types::injected_fault::{CRASHING_NAME, InjectedFault};
use draconis_types::lock::Mutex;
use draconis_types::{
    AccessTimes, Attributes, CacheValidity, FileType, Name, Node, Refusal, clear_suid_sgid,
};

use super::{VolumeTree, inode_of_node, log_and_get_refusal};

/// Xattr of the ACL for new nodes in a directory. Where it exists, the umask is ignored.
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";
/// Flags of `setxattr` in Linux.
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;

impl DirectoryServer for VolumeTree {
    fn lookup(&self, request: &mut Lookup) -> Result<Attributes, Refusal> {
        let deadly = InjectedFault::SurviveCrashingName.is_made()
            && request.name.as_bytes() == CRASHING_NAME;
        assert!(!deadly, "a name that ends its worker");
        let parent = inode_of_node(request.parent)?;
        let found = match request.name.as_bytes() {
            b"." => self.resolve_node(parent)?,
            name => self.volume.lookup(parent, name).map_err(log_and_get_refusal)?,
        };
        self.attributes(found)
    }

    fn get_attributes(&self, request: &mut GetAttributes) -> Result<Attributes, Refusal> {
        self.attributes(inode_of_node(request.node)?)
    }

    fn enumerate(&self, request: &mut Enumerate) -> Result<u32, Refusal> {
        let len = self.list_directory(request)?;
        if !request.no_atime && !self.no_directory_atime {
            self.record_access(request.node);
        }
        Ok(len)
    }

    fn read_link(&self, request: &mut ReadLink) -> Result<u32, Refusal> {
        let target =
            self.volume.read_link(inode_of_node(request.node)?).map_err(log_and_get_refusal)?;
        let len = copy_to_buffer(&mut request.buffer, &target)?;
        self.record_access(request.node);
        Ok(len)
    }

    fn get_xattr(&self, request: &mut GetXattr) -> Result<u32, Refusal> {
        let value = self.volume.xattr(inode_of_node(request.node)?, request.name.as_bytes());
        copy_to_buffer(&mut request.buffer, &value.map_err(log_and_get_refusal)?)
    }

    fn list_xattr(&self, request: &mut ListXattr) -> Result<u32, Refusal> {
        let names =
            self.volume.xattr_names(inode_of_node(request.node)?).map_err(log_and_get_refusal)?;
        let list: Vec<u8> = names.iter().flat_map(|name| [&name[..], b"\0"].concat()).collect();
        copy_to_buffer(&mut request.buffer, &list)
    }

    fn create(&self, request: &mut Create) -> Result<Attributes, Refusal> {
        let kind = FileType::from_mode(request.mode).ok_or(Refusal::Invalid)?;
        if matches!(kind, FileType::Directory | FileType::Symlink) {
            return Err(Refusal::Invalid);
        }
        let mode = self.mode_after_umask(request.parent, request.mode, request.umask)?;
        let (uid, gid, device) = (request.uid, request.gid, request.device);
        let new = NewNode { kind, mode, uid, gid, device, target: &[] };
        self.create_node(request.parent, &request.name, &new)
    }

    fn create_tmpfile(&self, request: &mut CreateTmpfile) -> Result<Attributes, Refusal> {
        let mode = self.mode_after_umask(request.parent, request.mode, request.umask)?;
        let (kind, uid, gid) = (FileType::File, request.uid, request.gid);
        let new = NewNode { kind, mode, uid, gid, device: (0, 0), target: &[] };
        let made = self
            .volume
            .create_tmpfile(inode_of_node(request.parent)?, &new)
            .map_err(log_and_get_refusal)?;
        self.attributes(made)
    }

    fn open(&self, request: &mut Open) -> Result<CacheValidity, Refusal> {
        let node = inode_of_node(request.node)?;
        if !InjectedFault::OpenFlags.is_made() {
            self.volume.check_open(node, request.access).map_err(log_and_get_refusal)?;
        }
        let read = request.access.read;
        let listed = self.no_directory_atime && self.attributes(node)?.kind == FileType::Directory;
        let due = read
            && !listed
            && self.volume.is_access_due(node)
            && !InjectedFault::AccessTime.is_made();
        let strict = self.volume.access_times() == AccessTimes::Strict;
        Ok(match due {
            false => CacheValidity::Valid,
            true if strict => CacheValidity::Never,
            true => CacheValidity::Stale,
        })
    }

    fn make_directory(&self, request: &mut MakeDirectory) -> Result<Attributes, Refusal> {
        let mode = self.mode_after_umask(request.parent, request.mode, request.umask)?;
        let (kind, uid, gid) = (FileType::Directory, request.uid, request.gid);
        let new = NewNode { kind, mode, uid, gid, device: (0, 0), target: &[] };
        self.create_node(request.parent, &request.name, &new)
    }

    fn symlink(&self, request: &mut Symlink) -> Result<Attributes, Refusal> {
        let target = copy_prefix(&request.target, request.len)?;
        let (kind, mode, uid, gid) = (FileType::Symlink, 0o777, request.uid, request.gid);
        let new = NewNode { kind, mode, uid, gid, device: (0, 0), target: &target };
        self.create_node(request.parent, &request.name, &new)
    }

    fn link(&self, request: &mut Link) -> Result<Attributes, Refusal> {
        let (node, parent) = (inode_of_node(request.node)?, inode_of_node(request.parent)?);
        self.volume.link(node, parent, request.name.as_bytes()).map_err(log_and_get_refusal)?;
        self.sync_name_change()?;
        self.attributes(node)
    }

    fn unlink(&self, request: &mut Unlink) -> Result<(), Refusal> {
        let parent = inode_of_node(request.parent)?;
        self.volume.unlink(parent, request.name.as_bytes()).map_err(log_and_get_refusal)?;
        self.sync_name_change()
    }

    fn remove_directory(&self, request: &mut RemoveDirectory) -> Result<(), Refusal> {
        let parent = inode_of_node(request.parent)?;
        self.volume
            .remove_directory(parent, request.name.as_bytes())
            .map_err(log_and_get_refusal)?;
        self.sync_name_change()
    }

    fn rename(&self, request: &mut Rename) -> Result<(), Refusal> {
        let how = match request.flags & !RENAME_WHITEOUT {
            0 => RenameMode::Replace,
            RENAME_NO_REPLACE => RenameMode::NoReplace,
            RENAME_EXCHANGE => RenameMode::Exchange,
            _ => return Err(Refusal::Invalid),
        };
        let (from, to) = (inode_of_node(request.from)?, inode_of_node(request.to)?);
        let (name, new_name) = (request.name.as_bytes(), request.new_name.as_bytes());
        let plain = request.flags & RENAME_WHITEOUT == 0 || InjectedFault::Whiteout.is_made();
        let renamed = if plain {
            self.volume.rename(from, name, to, new_name, how)
        } else {
            let whiteout = Whiteout { uid: request.uid, gid: request.gid };
            self.volume.rename_with_whiteout(from, name, to, new_name, how, whiteout)
        };
        renamed.map_err(log_and_get_refusal)?;
        self.sync_name_change()
    }

    fn set_attributes(&self, request: &mut SetAttributes) -> Result<Attributes, Refusal> {
        let node = inode_of_node(request.node)?;
        let mut change = request.change;
        if change.clear_privileges.is_some() {
            let now = self.volume.attributes(node).map_err(log_and_get_refusal)?;
            let mode = change.mode.unwrap_or(now.mode);
            let left = clear_suid_sgid(mode, now.gid, change.clear_privileges);
            if now.kind != FileType::Directory && left != mode {
                change.mode = Some(left);
            }
        }
        let changed = self.volume.set_attributes(node, &change).map_err(log_and_get_refusal)?;
        self.sync_data_change()?;
        Ok(Attributes { node: Node(node.0.into()), ..changed })
    }

    fn set_flags(&self, request: &mut SetFlags) -> Result<Attributes, Refusal> {
        let node = inode_of_node(request.node)?;
        self.volume.set_flags(node, request.flags).map_err(log_and_get_refusal)?;
        self.sync_data_change()?;
        self.attributes(node)
    }

    fn set_xattr(&self, request: &mut SetXattr) -> Result<(), Refusal> {
        let how = match request.flags {
            0 => XattrSet::Any,
            XATTR_CREATE if InjectedFault::NewXattr.is_made() => XattrSet::Any,
            XATTR_CREATE => XattrSet::Create,
            XATTR_REPLACE => XattrSet::Replace,
            _ => return Err(Refusal::Invalid),
        };
        let value = copy_prefix(&request.value, request.len)?;
        let (node, name) = (inode_of_node(request.node)?, request.name.as_bytes());
        let clear_setgid = request.clear_setgid && !InjectedFault::ListSetgid.is_made();
        self.volume
            .set_xattr(node, name, &value, how, clear_setgid)
            .map_err(log_and_get_refusal)?;
        self.sync_data_change()
    }

    fn remove_xattr(&self, request: &mut RemoveXattr) -> Result<(), Refusal> {
        let node = inode_of_node(request.node)?;
        self.volume.remove_xattr(node, request.name.as_bytes()).map_err(log_and_get_refusal)?;
        self.sync_data_change()
    }

    fn sync_volume(&self, _: &mut SyncVolume) -> Result<(), Refusal> {
        self.sync_if_writable()
    }
}

impl VolumeTree {
    /// Resolves a node by its own number, for file handles. Reserved inodes without a name, such as
    /// the journal's, are not found.
    fn resolve_node(&self, node: InodeNumber) -> Result<InodeNumber, Refusal> {
        let first = self.volume.superblock().first_inode;
        let named = node == InodeNumber::ROOT || node >= first;
        let found = named && !InjectedFault::Handles.is_made();
        if found { Ok(node) } else { Err(Refusal::NotFound) }
    }

    fn list_directory(&self, request: &mut Enumerate) -> Result<u32, Refusal> {
        let dir = inode_of_node(request.node)?;
        let (cookie, with_attributes) = (Cookie(request.cookie), request.with_attributes);
        let dots = self.volume.options().lists_dots;
        let mut entries = EntryWriter::new(&mut request.buffer);
        let mut why = None;
        self.volume
            .entries(dir, cookie, dots, |found| {
                let found = match found {
                    Ok(found) => found,
                    Err(damage) => {
                        why = Some(log_and_get_refusal(damage.error));
                        self.damaged_directories.add(dir);
                        return true;
                    }
                };
                // An invalid name cannot be looked up: it is damage, but does not affect the other
                // entries.
                let Ok(name) = Name::new(found.name) else { return true };
                let entry = DirEntry {
                    cookie: found.next.0,
                    node: Node(found.inode.0.into()),
                    kind: found.kind,
                    name,
                    attributes: with_attributes
                        .then(|| self.attributes(found.inode).ok())
                        .flatten(),
                };
                let fits = entries.push(&entry);
                if fits && with_attributes && found.kind == Some(FileType::Directory) {
                    self.volume.prefetch_directory(found.inode);
                }
                if !fits && entries.is_empty() {
                    why = Some(Refusal::BufferTooSmall);
                }
                fits
            })
            .map_err(log_and_get_refusal)?;
        // Readable entries before and after the damage are delivered first; the error ends the
        // listing.
        match why {
            _ if !entries.is_empty() => Ok(entries.len()),
            Some(why) => Err(why),
            None if self.damaged_directories.contains(dir, &self.volume) => Err(Refusal::Corrupt),
            None => Ok(entries.len()),
        }
    }

    fn create_node(
        &self,
        parent: Node,
        name: &Name,
        new: &NewNode<'_>,
    ) -> Result<Attributes, Refusal> {
        let parent = inode_of_node(parent)?;
        let mut new = *new;
        if self.directory_group {
            new.gid = self.attributes(parent)?.gid;
        }
        let made =
            self.volume.create(parent, name.as_bytes(), &new).map_err(log_and_get_refusal)?;
        self.sync_name_change()?;
        self.attributes(made)
    }

    /// Returns the permission bits of a new node. The umask applies unless the directory has a
    /// default ACL.
    fn mode_after_umask(&self, parent: Node, mode: u32, umask: u32) -> Result<u32, Refusal> {
        if mode & umask == 0 || InjectedFault::Umask.is_made() {
            return Ok(mode);
        }
        let parent = inode_of_node(parent)?;
        let has_acl = self.volume.inode(parent).map_err(log_and_get_refusal)?.has_xattrs()
            && self.volume.xattr(parent, DEFAULT_ACL).is_ok();
        Ok(if has_acl { mode } else { mode & !umask })
    }
}

/// Directories in which a listing found damage.
#[derive(Default)]
pub(super) struct DamagedDirectories(Mutex<HashSet<InodeNumber>>);

impl DamagedDirectories {
    /// Maximum number of directories.
    const MAX_DIRECTORIES: usize = 4096;

    fn add(&self, dir: InodeNumber) {
        let mut known = self.0.lock();
        if known.len() < Self::MAX_DIRECTORIES {
            known.insert(dir);
        }
    }

    /// Returns true if the directory is in the set and still damaged: its inode number may be
    /// reused.
    fn contains(&self, dir: InodeNumber, volume: &Volume) -> bool {
        if !self.0.lock().contains(&dir) {
            return false;
        }
        let mut is_damaged = false;
        let listed = volume.entries(dir, Cookie(0), false, |found| {
            is_damaged = found.is_err();
            !is_damaged
        });
        if listed.is_ok() && !is_damaged {
            self.0.lock().remove(&dir);
        }
        is_damaged
    }
}

/// Copies a result of any length into a buffer; an empty buffer requests only the length.
fn copy_to_buffer(buffer: &mut Block, bytes: &[u8]) -> Result<u32, Refusal> {
    if !buffer.is_empty() && buffer.copy_in(0, bytes) < bytes.len() {
        return Err(Refusal::BufferTooSmall);
    }
    Ok(bytes.len() as u32)
}

/// Returns the first `len` bytes of a block.
fn copy_prefix(block: &Block, len: u32) -> Result<Vec<u8>, Refusal> {
    let len = len as usize;
    if len > block.len() {
        return Err(Refusal::Invalid);
    }
    let mut bytes = vec![0; len];
    block.copy_out(0, &mut bytes);
    Ok(bytes)
}
