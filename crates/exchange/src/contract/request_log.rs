//! What a server of a tree tells one that comes after it, should it die.
//!
//! ```text
//!   server ── begin(request) ── works on it ── answers ── done ──▶
//!                │                  │                      │
//!                └── a memory that outlives the process: what it is working on, what it changed
//!   successor: repeats the changes that are nowhere else, keeps their answers, and gives those
//!   when they are asked for again
//! ```
//! A request is bytes of the protocol that the server speaks; nothing here looks into them.

use std::sync::Arc;

use super::Node;
use crate::heap::PoolBuffer;

/// Remembers requests until what they changed is safe, and their answers given.
pub trait RequestLog: Sync {
    /// Memory for contents of up to `len` bytes, which need not be copied to be remembered; there
    /// may be none left.
    fn allocate_buffer(&self, len: usize) -> Option<PoolBuffer>;

    /// The calling thread begins to work on a request. What may change the tree comes with the
    /// request's bytes, and what follows them.
    fn begin_request(&self, unique: u64, changing: Option<(&[u8], RequestData<'_>)>);

    /// The change that the calling thread works on has this outcome; its answer is sent next. What
    /// a change that failed has left of itself is in the tree when this returns, whatever happens
    /// to the server: it is never replayed.
    fn decided(&self, outcome: Outcome);

    /// The calling thread's request was answered.
    fn finish_request(&self);

    /// Another thread will answer the request that the calling thread works on.
    fn defer(&self) -> Option<Deferred>;

    /// A deferred request was answered.
    fn deferred_done(&self, deferred: Deferred);

    /// Whether that request is not to be worked on: it was the end of others that tried.
    fn is_quarantined(&self, unique: u64) -> bool;

    /// It was refused; `what` says what it was.
    fn report_quarantined(&self, what: String);

    /// What a server before this one has left, in the order in which it was done; `None` if
    /// this is the first one.
    ///
    /// # Errors
    /// Why nothing can be made of it.
    fn unfinished_requests(&self) -> Result<Option<Vec<LoggedRequest>>, String>;

    /// Has `work`, which does what is in the request, done as it was done then.
    fn replay(&self, inherited: &LoggedRequest, work: &mut dyn FnMut());

    /// Ends all changes of the tree: what was left does not agree with it.
    fn fail_replay(&self, why: &str);

    /// No client will ask again for what servers before this one have done.
    fn end_replay(&self);

    /// What has no name, and may have users that this server has not counted.
    fn orphans(&self) -> Vec<Node>;

    /// Whether that is so of `node`.
    fn is_orphan(&self, node: Node) -> bool;

    /// These nodes without a name have no user any more: their space can be used when this returns.
    fn release(&self, nodes: &[Node]);

    /// A node without a name has no user any more.
    fn release_orphan(&self, node: Node);
}

/// What follows a request's first bytes.
#[derive(Clone, Copy, Debug)]
pub enum RequestData<'a> {
    /// These bytes, if any.
    Bytes(&'a [u8]),
    /// What was read into a room.
    Room(&'a Arc<PoolBuffer>),
}

/// How a change ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The errno of its answer; 0 if it succeeded.
    pub errno: i32,
    /// The length of what was written, where contents were to be written.
    pub written_bytes: u32,
}

/// A request that is answered later than the thread that worked on it goes on.
#[derive(Debug)]
pub struct Deferred(pub u64);

/// A request that changed the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedRequest {
    /// Its place in the memory.
    pub position: u64,
    /// What its answer is called.
    pub unique: u64,
    /// Its bytes; of one that the tree has, contents that lie in a room are left out.
    pub request: Vec<u8>,
    /// The node that it made.
    pub created: Option<Node>,
    /// How it ended, unless the server died before that was recorded.
    pub outcome: Option<Outcome>,
    /// Whether the tree has what it changed already.
    pub is_accepted: bool,
    /// Whether it was answered for certain.
    pub answered: bool,
}
