//! FUSE_OPEN, FUSE_CREATE and FUSE_TMPFILE.
//!
//! A tree that checks nothing on open replies ENOSYS once, and the kernel then opens without a
//! request. A tree checks for immutable files, and for access times that are kept. Each open is a
//! request then, and the reply says whether cached pages may be used.

use draconis_exchange::contract::directory::{
    Create as CreateNode, CreateTmpfile, GetAttributes, Lookup, Open as OpenNode,
};
use draconis_exchange::contract::tree::Tree;
use draconis_types::{Access, Attributes, CacheValidity, FileType, Node, Refusal};

use super::decoder::{Create, Header};
use super::reply::{ReplyBody, create_reply, entry_timeout_seconds, open_reply};

/// Reads and writes bypass the page cache.
const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// The cached pages are still valid.
const FOPEN_KEEP_CACHE: u32 = 1 << 1;
/// A directory listing may be cached.
const FOPEN_CACHE_DIR: u32 = 1 << 3;
/// No flush request on close.
const FOPEN_NOFLUSH: u32 = 1 << 5;

/// Handle of a file or directory opened without access time updates.
pub(super) const NO_ATIME_HANDLE: u64 = 1;

/// The reply to the kernel, or the refusal.
type BodyOrRefusal = Result<ReplyBody, Refusal>;

/// Returns the `FOPEN_*` flags of an opened node.
pub(super) fn fopen_flags(kind: FileType, kept: CacheValidity) -> u32 {
    match (kind, kept) {
        (FileType::Directory, CacheValidity::Valid) => FOPEN_CACHE_DIR | FOPEN_KEEP_CACHE,
        (FileType::Directory, CacheValidity::Stale) => FOPEN_CACHE_DIR,
        (FileType::Directory, CacheValidity::Never) => 0,
        (_, CacheValidity::Valid) => FOPEN_NOFLUSH | FOPEN_KEEP_CACHE,
        (_, CacheValidity::Stale) => FOPEN_NOFLUSH,
        (_, CacheValidity::Never) => FOPEN_NOFLUSH | FOPEN_DIRECT_IO,
    }
}

/// Opens a node.
///
/// # Errors
/// The tree's error; [`Refusal::NotSupported`] if it never checks.
pub(super) fn open<T: Tree>(
    tree: &T,
    node: Node,
    access: Access,
    directory: bool,
) -> BodyOrRefusal {
    let kind = if directory { FileType::Directory } else { FileType::File };
    if !tree.handles_open(kind) {
        return Err(Refusal::NotSupported);
    }
    let kept = tree.open(&mut OpenNode { node, access })?;
    let handle = if access.read { 0 } else { NO_ATIME_HANDLE };
    Ok(open_reply(handle, fopen_flags(kind, kept)))
}

/// Creates a file and opens it.
///
/// # Errors
/// The tree's error; [`Refusal::NotSupported`] if opening needs no request. Creating the file is
/// then one request, and closing it none.
pub(super) fn create<T: Tree>(tree: &T, header: Header, create: Create) -> BodyOrRefusal {
    if !tree.handles_open(FileType::File) {
        return Err(Refusal::NotSupported);
    }
    let Create { name, mode, umask, access, exclusive } = create;
    let parent = header.node;
    let (uid, gid) = (header.uid, header.gid);
    let device = (0, 0);
    match tree.create(&mut CreateNode { parent, name, mode, umask, uid, gid, device }) {
        Ok(made) => Ok(entry_open_reply(tree, parent, &made, CacheValidity::Valid)),
        // Another caller has created it since the kernel's lookup.
        Err(Refusal::Exists) if !exclusive => {
            let found = tree.lookup(&mut Lookup { parent, name })?;
            let kept = tree.open(&mut OpenNode { node: found.node, access })?;
            Ok(entry_open_reply(tree, parent, &found, kept))
        }
        Err(why) => Err(why),
    }
}

/// Creates a file without a name, and opens it.
///
/// # Errors
/// The tree's error.
pub(super) fn create_tmpfile<T: Tree>(
    tree: &T,
    header: Header,
    (mode, umask): (u32, u32),
) -> BodyOrRefusal {
    let (parent, uid, gid) = (header.node, header.uid, header.gid);
    let made = tree.create_tmpfile(&mut CreateTmpfile { parent, mode, umask, uid, gid })?;
    Ok(entry_open_reply(tree, parent, &made, CacheValidity::Valid))
}

/// Returns the reply with a node created in `parent`, which the kernel references from now on.
fn entry_open_reply<T: Tree>(
    tree: &T,
    parent: Node,
    attributes: &Attributes,
    kept: CacheValidity,
) -> ReplyBody {
    tree.add_user(attributes.node);
    let directory = tree.get_attributes(&mut GetAttributes { node: parent });
    let name_seconds = directory.map_or(0, |directory| entry_timeout_seconds(&directory));
    create_reply(attributes, name_seconds, fopen_flags(FileType::File, kept))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fopen_flags_follow_cache_validity() {
        assert_eq!(
            fopen_flags(FileType::File, CacheValidity::Valid)
                & (FOPEN_KEEP_CACHE | FOPEN_DIRECT_IO),
            FOPEN_KEEP_CACHE
        );
        assert_eq!(
            fopen_flags(FileType::File, CacheValidity::Stale)
                & (FOPEN_KEEP_CACHE | FOPEN_DIRECT_IO),
            0
        );
        assert_eq!(
            fopen_flags(FileType::File, CacheValidity::Never)
                & (FOPEN_KEEP_CACHE | FOPEN_DIRECT_IO),
            FOPEN_DIRECT_IO
        );
        assert_eq!(fopen_flags(FileType::Directory, CacheValidity::Stale), FOPEN_CACHE_DIR);
        assert_eq!(fopen_flags(FileType::Directory, CacheValidity::Never), 0);
    }
}
