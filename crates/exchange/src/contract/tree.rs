//! A file tree served through the contracts; the interface that front ends are generic over.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::Duration,
};

use super::{
    Attributes, Call, FileType, Name, Node, Refusal, StatFs,
    directory::{self, Bind, BindError, Directory, DirectoryServer, Endpoint, Lookup},
    file::{self, FileServer},
};
use crate::{
    channel::{ChannelError, Client, RpcClient, Server},
    contract::file::File,
    heap::Block,
};

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

/// Result of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WalkResult {
    /// The node that the path names.
    At(Attributes),
    /// A symbolic link on the way.
    Link {
        /// The link.
        link: Node,
        /// Offset of its name in the path.
        name_at: usize,
        /// Offset of the rest, after the name and its slashes.
        rest_offset: usize,
    },
}

/// Walks `path` from `from` name by name, and stops at a symbolic link on the way; with
/// `follow_last`, also at a link that the whole path names.
///
/// # Errors
/// Refusal of a name that cannot be looked up.
pub fn walk_path<T: DirectoryServer + ?Sized>(
    tree: &T,
    from: Node,
    path: &[u8],
    follow_last: bool,
) -> Result<WalkResult, Refusal> {
    let start = if path.first() == Some(&b'/') { Node::ROOT } else { from };
    let mut here = tree.get_attributes(&mut directory::GetAttributes { node: start })?;
    let mut at = 0;
    while let Some((name_at, rest_at)) = next_name(path, at) {
        if here.kind != FileType::Directory {
            return Err(Refusal::NotADirectory);
        }
        let end = path[name_at..rest_at].iter().position(|&b| b == b'/');
        let name = Name::new(&path[name_at..end.map_or(rest_at, |end| name_at + end)])?;
        here = tree.lookup(&mut Lookup { parent: here.node, name })?;
        let last = rest_at == path.len() && !path.ends_with(b"/");
        if here.kind == FileType::Symlink && (follow_last || !last) {
            return Ok(WalkResult::Link { link: here.node, name_at, rest_offset: rest_at });
        }
        at = rest_at;
    }
    if path.ends_with(b"/") && here.kind != FileType::Directory {
        return Err(Refusal::NotADirectory);
    }
    Ok(WalkResult::At(here))
}

/// Returns the offset of the next name at or after `at`, and the offset after its slashes.
fn next_name(path: &[u8], at: usize) -> Option<(usize, usize)> {
    let name_at = at + path[at..].iter().position(|&b| b != b'/')?;
    let name_end =
        path[name_at..].iter().position(|&b| b == b'/').map_or(path.len(), |n| name_at + n);
    let rest_at =
        path[name_end..].iter().position(|&b| b != b'/').map_or(path.len(), |n| name_end + n);
    Some((name_at, rest_at))
}

/// Serves the directory contract of `tree` over `end`, and every endpoint bound through it in its
/// own thread. Returns once all are closed.
///
/// # Errors
/// Reason that the client of `end` was lost, as [`directory::serve`].
pub fn serve_tree<T: Tree + Sync + ?Sized>(
    end: Server<Directory>,
    tree: &T,
    patience: Duration,
) -> Result<(), ChannelError> {
    thread::scope(|scope| serve_in_scope(scope, end, tree, patience))
}

fn serve_in_scope<'scope, 'env, T: Tree + Sync + ?Sized>(
    scope: &'scope thread::Scope<'scope, 'env>,
    end: Server<Directory>,
    tree: &'env T,
    patience: Duration,
) -> Result<(), ChannelError> {
    end.serve(patience, |message| match message {
        directory::ToServer::Bind(mut bind) => Some(match resolve_path(tree, &mut bind) {
            Ok(attributes) => {
                let (ack, end) = bind.into_ack(attributes);
                spawn_server(scope, end, tree, attributes.node, patience);
                ack.into()
            }
            Err(why) => bind.into_nak(why).into(),
        }),
        other => directory::answer(tree, other),
    })
}

/// Starts a thread that serves a bound endpoint. A lost client or a panic of the tree closes only
/// that endpoint.
fn spawn_server<'scope, 'env, T: Tree + Sync + ?Sized>(
    scope: &'scope thread::Scope<'scope, 'env>,
    end: Endpoint,
    tree: &'env T,
    node: Node,
    patience: Duration,
) {
    tree.add_user(node);
    let serve = move || {
        let _held = NodeUser { tree, node };
        match end {
            Endpoint::File(end) => {
                tree.notify_changes_to(&end);
                file::serve(end, &tree.file(node), patience)
            }
            Endpoint::Directory(end) => serve_in_scope(scope, end, tree, patience),
        }
    };
    // Unwind-safe: the tree is shared between threads anyway, and its locks handle panics.
    scope.spawn(move || catch_unwind(AssertUnwindSafe(serve)));
}

/// Counts a bound endpoint as a user of its node until it closes.
struct NodeUser<'a, T: Tree + ?Sized> {
    tree: &'a T,
    node: Node,
}

impl<T: Tree + ?Sized> Drop for NodeUser<'_, T> {
    fn drop(&mut self) {
        self.tree.remove_users(self.node, 1);
    }
}

/// Returns the node that a path names, if the endpoint is of its type.
fn resolve_path<T: DirectoryServer + ?Sized>(
    tree: &T,
    bind: &mut Bind,
) -> Result<Attributes, BindError> {
    let len = bind.len as usize;
    if len > MAX_PATH_BYTES || len > bind.path.len() {
        return Err(Refusal::Invalid.into());
    }
    let mut path = vec![0; len];
    bind.path.copy_out(0, &mut path);
    let attributes = match walk_path(tree, bind.from, &path, true)? {
        WalkResult::At(attributes) => attributes,
        WalkResult::Link { link, name_at, rest_offset: rest_at } => {
            return Err(expand_symlink(tree, link, &path, name_at, rest_at, &mut bind.path));
        }
    };
    match (&bind.end, attributes.kind) {
        (Endpoint::Directory(_), FileType::Directory) => Ok(attributes),
        (Endpoint::Directory(_), _) => Err(Refusal::NotADirectory.into()),
        (Endpoint::File(_), FileType::Directory) => Err(Refusal::IsADirectory.into()),
        (Endpoint::File(_), _) => Ok(attributes),
    }
}

/// Maximum length of a path in bytes, as on Linux.
pub const MAX_PATH_BYTES: usize = 4096;

/// Replaces the link in the path with its target.
fn expand_symlink<T: DirectoryServer + ?Sized>(
    tree: &T,
    link: Node,
    path: &[u8],
    name_at: usize,
    rest_at: usize,
    into: &mut Block,
) -> BindError {
    let mut asked = directory::ReadLink { node: link, buffer: Block::private(MAX_PATH_BYTES) };
    let len = match tree.read_link(&mut asked) {
        Ok(len) => len as usize,
        Err(why) => return why.into(),
    };
    let mut target = vec![0; len.min(MAX_PATH_BYTES)];
    asked.buffer.copy_out(0, &mut target);
    let mut new = if target.starts_with(b"/") { Vec::new() } else { path[..name_at].to_vec() };
    new.extend_from_slice(&target);
    let prefix_len = new.len() as u32;
    if rest_at < path.len() || path.ends_with(b"/") {
        new.push(b'/');
        new.extend_from_slice(&path[rest_at..]);
    }
    if new.len() > MAX_PATH_BYTES || into.copy_in(0, &new) < new.len() {
        return Refusal::NameTooLong.into();
    }
    BindError::Reparse { len: new.len() as u32, prefix_len, is_symlink: true }
}

/// Maximum symbolic links that a bind follows.
pub const MAX_SYMLINKS: u32 = 40;

/// Binds `end` to `path`, and follows reparses that stay within the directory's volume.
///
/// `path` is a block of at least [`MAX_PATH_BYTES`] to work in; it is returned.
///
/// The refusal of the server, [`Refusal::TooManyLinks`] after [`MAX_SYMLINKS`] links, or loss of
/// the server. The path block is lost only with the server.
pub fn bind(
    directory: &mut RpcClient<Directory>,
    from: Node,
    path: &[u8],
    mut room: Block,
    mut end: Endpoint,
) -> Result<(Attributes, Block), (Refusal, Option<Block>)> {
    if path.len() > MAX_PATH_BYTES || room.copy_in(0, path) < path.len() {
        return Err((Refusal::NameTooLong, Some(room)));
    }
    let mut len = path.len() as u32;
    for _ in 0..=MAX_SYMLINKS {
        let message = Bind { from, path: room, len, end };
        let nak = match directory.call(message) {
            Ok(Ok(ack)) => return Ok((ack.attributes, ack.path)),
            Ok(Err(nak)) => nak,
            Err(lost) => return Err((lost.into(), None)),
        };
        (room, end) = (nak.path, nak.end);
        match nak.why {
            BindError::Refused(why) => return Err((why, Some(room))),
            BindError::Reparse { len: new, .. } if new as usize <= room.len() => len = new,
            BindError::Reparse { .. } => return Err((Refusal::Invalid, Some(room))),
        }
    }
    Err((Refusal::TooManyLinks, Some(room)))
}

/// Creates a channel, binds its server's endpoint to the node that `path` names, and returns the
/// client's. The channel uses the transport of `directory`: [`channel::pair`](crate::channel::pair)
/// between threads, [`Session::pair`](crate::channel::session::Session::pair) between processes.
///
/// # Errors
/// As [`bind`].
pub fn open(
    directory: &mut RpcClient<Directory>,
    from: Node,
    path: &[u8],
    (client, server): (Client<File>, Server<File>),
    patience: Duration,
) -> Result<(RpcClient<File>, Attributes), Refusal> {
    let room = Block::private(MAX_PATH_BYTES);
    match bind(directory, from, path, room, Endpoint::File(server)) {
        Ok((attributes, _)) => Ok((RpcClient::new(client, patience), attributes)),
        Err((why, _)) => Err(why),
    }
}
