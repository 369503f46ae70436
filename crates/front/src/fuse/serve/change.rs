//! Requests that change the tree: decodes, applies and answers them.
//!
//! ```text
//!   request ─ decode ─▶ Change ─ apply ─▶ Answer: outcome, reply, notifications
//!                                           ├─ a worker records the outcome, then sends the reply
//!                                           └─ a replay compares the outcome and keeps the reply
//! ```
//! Law 1: [`Server::apply_request`] applies every change. It returns the answer and sends nothing. So the
//! oplog has the outcome of every change before the kernel has its reply, and a replay has an
//! answer for every change.
//! Law 2: the FUSE library decodes no request that changes the tree.

mod decode;

use draconis_exchange::contract::directory::{
    Create, GetAttributes, Link, MakeDirectory, RemoveDirectory, RemoveXattr, Rename,
    SetAttributes, SetFlags, SetXattr, Symlink, Unlink,
};
use draconis_exchange::contract::file::{Fallocate, FileServer};
use draconis_exchange::contract::request_log::RequestOutcome;
use draconis_exchange::contract::tree::Tree;
use draconis_types::Block;
use draconis_types::injected_fault::InjectedFault;
use draconis_types::{
    AttributeChange, AttributeName, Attributes, CacheValidity, FallocateMode, FileType, Name, Node,
    Refusal,
};
use rustix::io::Errno;

use super::{Server, into_errno, into_errno_or_enosys, reply_to};
use crate::fuse::decoder::{self, Header};
use crate::fuse::open;
use crate::fuse::reply::{self, Reply, ReplyBody};
use crate::fuse::request::{MAX_IO_BYTES, Request};

/// A decoded request that changes the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    SetAttributes(AttributeChange),
    Symlink { name: Name, target: Vec<u8> },
    MakeNode { name: Name, mode: u32, umask: u32, device: (u32, u32) },
    MakeDirectory { name: Name, mode: u32, umask: u32 },
    Unlink { name: Name },
    RemoveDirectory { name: Name },
    Rename { name: Name, to: Node, new_name: Box<Name>, flags: u32 },
    Link { node: Node, name: Name },
    Write(decoder::Write),
    SetXattr(decoder::SetXattr),
    RemoveXattr { name: AttributeName },
    Create(decoder::Create),
    CreateTmpfile { mode: u32, umask: u32 },
    Fallocate { offset: u64, len: u64, how: FallocateMode },
    SetFlags { flags: u32 },
    SetXflags { xflags: u32 },
}

/// The answer to a change, with the notifications that the kernel needs before it.
#[derive(Clone, Debug)]
pub(super) struct ChangeReply {
    pub(super) outcome: RequestOutcome,
    pub(super) reply: Reply,
    /// The kernel's attributes of the node are outdated.
    pub(super) outdates_attributes: bool,
    /// The notification that drops outdated pages. Only the notifier's thread may send it.
    pub(super) drop_pages: Option<Reply>,
}

impl ChangeReply {
    fn new(header: Header, body: Result<ReplyBody, Errno>) -> Self {
        let errno = body.as_ref().err().map_or(0, |errno| errno.raw_os_error());
        let outcome = RequestOutcome { errno, written_bytes: 0 };
        let reply = reply_to(header, body);
        Self { outcome, reply, outdates_attributes: false, drop_pages: None }
    }

    /// Creates the answer to a change that failed before it was tried, or whose replay failed.
    pub(super) fn error_reply(header: Header, errno: Errno) -> Self {
        Self::new(header, Err(errno))
    }
}

impl<T: Tree + Sync> Server<'_, T> {
    /// Applies the change of a request and returns its answer.
    pub(super) fn apply_request(&self, header: Header, request: &mut Request) -> ChangeReply {
        let setxattr_ext = self.has_setxattr_ext();
        match Change::decode_change(
            header,
            request.bytes(),
            request.detached_data_len(),
            setxattr_ext,
        ) {
            Ok(change) => self.apply_change(header, change, request),
            Err(errno) => ChangeReply::error_reply(header, errno),
        }
    }

    /// Rebuilds the answer to a change that the tree already has, made by an earlier worker.
    /// Returns `None` if only applying the request again gives the answer.
    pub(super) fn rebuild_reply(
        &self,
        header: Header,
        request: &[u8],
        made: Option<Node>,
        outcome: Option<RequestOutcome>,
    ) -> Option<ChangeReply> {
        if let Some(errno) = outcome.map(|it| it.errno).filter(|errno| *errno != 0) {
            return Some(ChangeReply::error_reply(header, Errno::from_raw_os_error(errno)));
        }
        // The oplog has no data of a write that the tree has.
        let change =
            Change::decode_change(header, request, MAX_IO_BYTES, self.has_setxattr_ext()).ok()?;
        let node = |node: Option<Node>| node.ok_or(Refusal::Io).and_then(|it| self.attributes(it));
        let named = |found: Result<Attributes, Refusal>| {
            found.map(|it| reply::entry_reply(&it, self.entry_timeout_seconds(header.node)))
        };
        let body = match (change, outcome) {
            (
                Change::Symlink { .. } | Change::MakeNode { .. } | Change::MakeDirectory { .. },
                _,
            ) => named(node(made)),
            (Change::Link { node: linked, .. }, _) => named(node(Some(linked))),
            (Change::Create(_) | Change::CreateTmpfile { .. }, _) => node(made).map(|it| {
                let entry_timeout = self.entry_timeout_seconds(header.node);
                reply::create_reply(
                    &it,
                    entry_timeout,
                    open::fopen_flags(FileType::File, CacheValidity::Valid),
                )
            }),
            (
                Change::Unlink { .. }
                | Change::RemoveDirectory { .. }
                | Change::Rename { .. }
                | Change::SetXattr(_)
                | Change::RemoveXattr { .. },
                _,
            ) => Ok(ReplyBody::default()),
            // Other changes may consist of several steps: only a recorded outcome proves that the
            // last one was made.
            (_, None) => return None,
            (Change::SetAttributes(_), Some(_)) => {
                node(Some(header.node)).map(|it| reply::attr_reply(&it))
            }
            (Change::Fallocate { .. }, Some(_)) => Ok(ReplyBody::default()),
            (Change::SetFlags { .. } | Change::SetXflags { .. }, Some(_)) => {
                let body = Ok(reply::ioctl_empty_reply());
                return Some(ChangeReply {
                    outdates_attributes: true,
                    ..ChangeReply::new(header, body)
                });
            }
            (Change::Write(write), Some(outcome)) => {
                return Some(self.write_reply_for(header, write, Ok(outcome.written_bytes)));
            }
        };
        Some(ChangeReply::new(header, into_errno(body)))
    }

    fn apply_change(&self, header: Header, change: Change, request: &mut Request) -> ChangeReply {
        let (tree, Header { node, uid, gid, .. }) = (self.tree, header);
        let done = |()| ReplyBody::default();
        let body = match change {
            Change::Write(write) => {
                return self.write_reply_for(
                    header,
                    write,
                    request.write_all_data(tree, node, write),
                );
            }
            Change::SetFlags { flags } => return self.set_flags(header, Ok(flags)),
            Change::SetXflags { xflags } => {
                let flags = self.attributes(node).and_then(|it| {
                    decoder::apply_xflags(it.flags, xflags).ok_or(Refusal::NotSupported)
                });
                return self.set_flags(header, flags);
            }
            Change::Create(create) => {
                return ChangeReply::new(
                    header,
                    into_errno_or_enosys(open::create(tree, header, create)),
                );
            }
            Change::CreateTmpfile { mode, umask } => {
                let made = open::create_tmpfile(tree, header, (mode, umask));
                return ChangeReply::new(header, into_errno_or_enosys(made));
            }
            Change::SetAttributes(change) => tree
                .set_attributes(&mut SetAttributes { node, change })
                .map(|changed| reply::attr_reply(&changed)),
            Change::Symlink { name, target } => {
                let mut block = Block::private(target.len());
                block.copy_in(0, &target);
                let (parent, len) = (node, target.len() as u32);
                let mut make = Symlink { parent, name, target: block, len, uid, gid };
                tree.symlink(&mut make).map(|made| self.reference_entry(node, &made))
            }
            Change::MakeNode { name, mode, umask, device } => {
                let mut make = Create { parent: node, name, mode, umask, uid, gid, device };
                tree.create(&mut make).map(|made| self.reference_entry(node, &made))
            }
            Change::MakeDirectory { name, mode, umask } => {
                let mut make = MakeDirectory { parent: node, name, mode, umask, uid, gid };
                tree.make_directory(&mut make).map(|made| self.reference_entry(node, &made))
            }
            Change::Link { node: linked, name } => {
                let mut link = Link { node: linked, parent: node, name };
                tree.link(&mut link).map(|made| self.reference_entry(node, &made))
            }
            Change::Unlink { name } => tree.unlink(&mut Unlink { parent: node, name }).map(done),
            Change::RemoveDirectory { name } => {
                tree.remove_directory(&mut RemoveDirectory { parent: node, name }).map(done)
            }
            Change::Rename { name, to, new_name, flags } => {
                let new_name = *new_name;
                let mut rename = Rename { from: node, name, to, new_name, flags, uid, gid };
                tree.rename(&mut rename).map(done)
            }
            Change::SetXattr(set) => self.set_xattr(node, &set, request.bytes()).map(done),
            Change::RemoveXattr { name } => {
                tree.remove_xattr(&mut RemoveXattr { node, name }).map(done)
            }
            Change::Fallocate { offset, len, how } => {
                tree.file(node).fallocate(&mut Fallocate { offset, len, how }).map(done)
            }
        };
        ChangeReply::new(header, into_errno(body))
    }

    /// Returns the answer with a new name of a node, which the kernel references from now on.
    fn reference_entry(&self, parent: Node, attributes: &Attributes) -> ReplyBody {
        self.tree.add_user(attributes.node);
        reply::entry_reply(attributes, self.entry_timeout_seconds(parent))
    }

    fn entry_timeout_seconds(&self, directory: Node) -> u64 {
        self.attributes(directory).map_or(0, |it| reply::entry_timeout_seconds(&it))
    }

    /// Returns the answer to a write. A direct write leaves the kernel's pages outdated.
    fn write_reply_for(
        &self,
        header: Header,
        write: decoder::Write,
        written: Result<u32, Refusal>,
    ) -> ChangeReply {
        let body = into_errno(written.map(reply::write_reply));
        let mut answer = ChangeReply::new(header, body);
        let Ok(len) = written else { return answer };
        answer.outcome.written_bytes = len;
        // Before buffered writes, the kernel announces that privileges are cleared.
        answer.outdates_attributes = write.direct && write.clear_privileges;
        let is_outdated =
            self.pages.may_contain(header.node) && !InjectedFault::StalePages.is_made();
        if write.direct && len > 0 && is_outdated {
            let notice = Reply::invalidate_pages(header.node, write.offset, len.into());
            answer.drop_pages = Some(notice);
        }
        answer
    }

    fn set_xattr(
        &self,
        node: Node,
        set: &decoder::SetXattr,
        request: &[u8],
    ) -> Result<(), Refusal> {
        let value = request.get(set.value.clone()).ok_or(Refusal::Invalid)?;
        let mut block = Block::private(value.len());
        block.copy_in(0, value);
        self.tree.set_xattr(&mut SetXattr {
            node,
            name: set.name,
            value: block,
            len: value.len() as u32,
            flags: set.flags,
            clear_setgid: set.clear_setgid,
        })
    }

    /// Changes flags, and with them the ctime, which the kernel does not expect.
    fn set_flags(&self, header: Header, flags: Result<u32, Refusal>) -> ChangeReply {
        let node = header.node;
        let set = flags.and_then(|flags| self.tree.set_flags(&mut SetFlags { node, flags }));
        let outdates_attributes = set.is_ok() && !InjectedFault::StaleCtimeAfterFlags.is_made();
        let body = into_errno(set.map(|_| reply::ioctl_empty_reply()));
        ChangeReply { outdates_attributes, ..ChangeReply::new(header, body) }
    }

    pub(super) fn attributes(&self, node: Node) -> Result<Attributes, Refusal> {
        self.tree.get_attributes(&mut GetAttributes { node })
    }
}
