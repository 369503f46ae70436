//! The directory contract: names, nodes and attributes. Operations name nodes, not paths.
//!
//! Directory entries travel packed in a block: see [`EntryWriter`] and [`EntryReader`].

mod entries;

pub use entries::{DirEntry, EntryReader, EntryWriter};

use draconis_types::Block;
use draconis_types::{
    Access, AttributeChange, AttributeName, Attributes, CacheValidity, FileType, Name, Node,
    Refusal,
};

/// `Rename` flag: fail with [`Refusal::Exists`] rather than replace.
pub const RENAME_NO_REPLACE: u32 = 1;
/// `Rename` flag: exchange the two names.
pub const RENAME_EXCHANGE: u32 = 2;
/// `Rename` flag: leave a whiteout (device 0:0) under the old name, as union mounts require.
pub const RENAME_WHITEOUT: u32 = 4;

crate::contract! {
    /// Names and the nodes that they refer to.
    pub contract Directory served by DirectoryServer, starting in Ready {
        /// Accepts every request.
        state Ready {
            /// Returns the attributes of the node `name` in `parent`. `.` and `..` are valid names;
            /// `.` names any node itself.
            call lookup: Lookup { parent: Node, name: Name }
                -> AckLookup { attributes: Attributes } => Ready
                 | NakLookup why Refusal => Ready;

            /// Returns the attributes of a node.
            call get_attributes: GetAttributes { node: Node }
                -> AckGetAttributes { attributes: Attributes } => Ready
                 | NakGetAttributes why Refusal => Ready;

            /// Packs directory entries into `buffer`, from the one after `cookie` (0: from the
            /// first). `AckEnumerate::len` bytes were written; 0 at the end.
            /// [`Refusal::BufferTooSmall`] if no entry fits. `no_atime` keeps the access time.
            call enumerate: Enumerate (buffer: Block) {
                node: Node, cookie: u64, with_attributes: bool, no_atime: bool
            }
                -> AckEnumerate { len: u32 } => Ready
                 | NakEnumerate why Refusal => Ready;

            /// Writes the target of a symbolic link into `buffer`.
            call read_link: ReadLink (buffer: Block) { node: Node }
                -> AckReadLink { len: u32 } => Ready
                 | NakReadLink why Refusal => Ready, or NotSupported;

            /// Writes the value of an extended attribute into `buffer`. With an empty buffer,
            /// returns only the length.
            call get_xattr: GetXattr (buffer: Block) { node: Node, name: AttributeName }
                -> AckGetXattr { len: u32 } => Ready
                 | NakGetXattr why Refusal => Ready, or NotSupported;

            /// Writes the NUL-terminated names of a node's extended attributes into `buffer`. With
            /// an empty buffer, returns only the length.
            call list_xattr: ListXattr (buffer: Block) { node: Node }
                -> AckListXattr { len: u32 } => Ready
                 | NakListXattr why Refusal => Ready, or NotSupported;

            /// Creates a file, device, fifo or socket, as `mode` says. The bits of `umask` are
            /// cleared unless the parent has a default ACL, which then applies. `MakeDirectory`
            /// does the same.
            call create: Create {
                parent: Node, name: Name, mode: u32, umask: u32, uid: u32, gid: u32,
                device: (u32, u32)
            }
                -> AckCreate { attributes: Attributes } => Ready
                 | NakCreate why Refusal => Ready, or NotSupported;

            /// Creates an unnamed file, as `Create` would in `parent`. It exists while it has
            /// users, or until `Link` names it.
            call create_tmpfile: CreateTmpfile {
                parent: Node, mode: u32, umask: u32, uid: u32, gid: u32
            }
                -> AckCreateUnnamed { attributes: Attributes } => Ready
                 | NakCreateUnnamed why Refusal => Ready, or NotSupported;

            /// Checks whether a file or directory may be opened where the node, not its mode,
            /// decides. The answer says how the client may use cached contents.
            call open: Open { node: Node, access: Access }
                -> AckOpen { kept: CacheValidity } => Ready
                 | NakOpen why Refusal => Ready, or NotSupported;

            /// Creates a directory.
            call make_directory: MakeDirectory {
                parent: Node, name: Name, mode: u32, umask: u32, uid: u32, gid: u32
            }
                -> AckMakeDirectory { attributes: Attributes } => Ready
                 | NakMakeDirectory why Refusal => Ready, or NotSupported;

            /// Creates a symbolic link to the first `len` bytes of `target`.
            call symlink: Symlink (target: Block) {
                parent: Node, name: Name, len: u32, uid: u32, gid: u32
            }
                -> AckSymlink { attributes: Attributes } => Ready
                 | NakSymlink why Refusal => Ready, or NotSupported;

            /// Adds a name for `node`.
            call link: Link { node: Node, parent: Node, name: Name }
                -> AckLink { attributes: Attributes } => Ready
                 | NakLink why Refusal => Ready, or NotSupported;

            /// Removes a name of a node that is not a directory.
            call unlink: Unlink { parent: Node, name: Name }
                -> AckUnlink {} => Ready
                 | NakUnlink why Refusal => Ready, or NotSupported;

            /// Removes an empty directory.
            call remove_directory: RemoveDirectory { parent: Node, name: Name }
                -> AckRemoveDirectory {} => Ready
                 | NakRemoveDirectory why Refusal => Ready, or NotSupported;

            /// Renames. `flags` are `RENAME_*`; `uid` and `gid` own the whiteout.
            call rename: Rename {
                from: Node, name: Name, to: Node, new_name: Name, flags: u32, uid: u32, gid: u32
            }
                -> AckRename {} => Ready
                 | NakRename why Refusal => Ready, or NotSupported;

            /// Changes some attributes of a node.
            call set_attributes: SetAttributes { node: Node, change: AttributeChange }
                -> AckSetAttributes { attributes: Attributes } => Ready
                 | NakSetAttributes why Refusal => Ready, or NotSupported;

            /// Sets the inode flags that users may change, as `chattr` does (`FS_*_FL`).
            call set_flags: SetFlags { node: Node, flags: u32 }
                -> AckSetFlags { attributes: Attributes } => Ready
                 | NakSetFlags why Refusal => Ready, or NotSupported;

            /// Sets an extended attribute to the first `len` bytes of `value`; `flags` are
            /// `XATTR_CREATE` and `XATTR_REPLACE`. With `clear_setgid`, setting an access ACL
            /// clears setgid: the caller is not in the file's group.
            call set_xattr: SetXattr (value: Block) {
                node: Node, name: AttributeName, len: u32, flags: u32, clear_setgid: bool
            }
                -> AckSetXattr {} => Ready
                 | NakSetXattr why Refusal => Ready, or NotSupported;

            /// Removes an extended attribute.
            call remove_xattr: RemoveXattr { node: Node, name: AttributeName }
                -> AckRemoveXattr {} => Ready
                 | NakRemoveXattr why Refusal => Ready, or NotSupported;

            /// Makes all earlier changes of the volume durable.
            call sync_volume: SyncVolume {}
                -> AckSyncVolume {} => Ready
                 | NakSyncVolume why Refusal => Ready, or NotSupported;

            tell close: Close {} => Done;
        }
        /// The channel is closed.
        state Done {}
    }
}

impl DirEntry {
    /// Returns the entry for the answer of a lookup.
    pub fn new(cookie: u64, name: Name, kind: FileType, node: Node) -> Self {
        Self { cookie, node, kind: Some(kind), name, attributes: None }
    }
}
