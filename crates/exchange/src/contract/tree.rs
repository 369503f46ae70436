//! A file tree behind the contracts; the interface that front ends are generic over.

use super::{
    directory::DirectoryServer,
    file::{self, File, FileServer},
};
use crate::channel::Server;
use draconis_types::{FileType, Node, Refusal, StatFs};

/// A tree whose operations can be called directly, without a channel between.
pub trait Tree: DirectoryServer {
    /// Server of one file: as cheap as the node's number.
    type File<'a>: FileServer
    where
        Self: 'a;

    /// Returns the server of `node`'s contents. The first request reports a missing node.
    fn file(&self, node: Node) -> Self::File<'_>;

    /// Returns the statistics of `statfs`.
    fn statfs(&self) -> StatFs;

    /// Returns true if the tree can be changed.
    fn is_writable(&self) -> bool {
        false
    }

    /// Returns true if a change may have to wait for [`Tree::remove_users`] to free space. A front
    /// end then answers other requests meanwhile.
    fn is_low_on_space(&self) -> bool {
        false
    }

    /// Returns true if `Open` may refuse or answer differently, for files or for directories. If
    /// false, a client opens without asking for as long as it lives.
    fn handles_open(&self, kind: FileType) -> bool {
        let _ = kind;
        false
    }

    /// Notifies the client of `end` of every change from now on, so that it may cache answers:
    /// [`Server::change_notifier`]. Clients of other trees cache nothing.
    fn notify_changes_to(&self, end: &Server<File>) {
        let _ = end;
    }

    /// Makes files durable, or only their data: [`FileServer::sync`] of each, with one wait for all
    /// where the tree can.
    ///
    /// # Errors
    /// The first refusal.
    fn sync_files(&self, files: &[(Node, bool)]) -> Result<(), Refusal> {
        let sync = |&(node, data_only): &_| self.file(node).sync(&mut file::Sync { data_only });
        files.iter().try_for_each(sync)
    }

    /// Adds a user of `node`. Without a name, the node lives until its last user is gone. Immutable
    /// trees need not implement it.
    fn add_user(&self, node: Node) {
        let _ = node;
    }

    /// Removes `users` users of `node`.
    fn remove_users(&self, node: Node, users: u64) {
        let _ = (node, users);
    }
}
