//! The oplog: requests that a server records for its successor, should it die.
//!
//! ```text
//!   server ── begin_request ── executes it ── answers ── finish_request ──▶
//!                │                  │                      │
//!                └── memory that outlives the process: requests in flight, and changes
//!   successor: replays changes that are only in the oplog, and sends their answers
//!   when the requests are repeated
//! ```
//! A request is bytes of the server's protocol, which this module does not parse.

use std::sync::Arc;

use crate::heap::PoolBuffer;
use draconis_types::Node;

/// Records requests until their changes are safe and their answers sent.
pub trait RequestLog: Sync {
    /// Allocates a page-pool buffer for data of up to `len` bytes, which then needs no copy into
    /// the oplog. `None` if the pool is full.
    fn allocate_buffer(&self, len: usize) -> Option<PoolBuffer>;

    /// Records that the calling thread works on a request. A request that may change the tree
    /// passes its bytes and the data that follows.
    fn begin_request(&self, unique: u64, changing: Option<(&[u8], RequestData<'_>)>);

    /// Records the outcome of the calling thread's change; its answer is sent next. When this
    /// returns, what a failed change left in the tree survives the server: it is never replayed.
    fn record_outcome(&self, outcome: RequestOutcome);

    /// Records that the calling thread's request was answered.
    fn finish_request(&self);

    /// Lets another thread answer the calling thread's request later.
    fn defer_completion(&self) -> Option<DeferredRequest>;

    /// Records that a deferred request was answered.
    fn finish_deferred(&self, deferred: DeferredRequest);

    /// Returns true if the request is quarantined: it killed earlier servers.
    fn is_quarantined(&self, unique: u64) -> bool;

    /// Reports that a quarantined request was refused; `what` describes it.
    fn report_quarantined(&self, what: String);

    /// Returns the requests that an earlier server has left, in execution order; `None` for the
    /// first server.
    ///
    /// # Errors
    /// Reason that the oplog cannot be used.
    fn unfinished_requests(&self) -> Result<Option<Vec<LoggedRequest>>, String>;

    /// Replays a request: runs `work` with the recorded results.
    fn replay(&self, inherited: &LoggedRequest, work: &mut dyn FnMut());

    /// Ends all changes of the tree: the oplog does not match it.
    fn fail_replay(&self, why: &str);

    /// Ends the replay: no client will repeat a request of an earlier server.
    fn end_replay(&self);

    /// Handles the end of the replay: if an error had ended all changes, it ends them again.
    fn finish_replay(&self);

    /// Returns orphan nodes that may have users which this server has not counted.
    fn orphans(&self) -> Vec<Node>;

    /// Returns true if `node` is such an orphan.
    fn is_orphan(&self, node: Node) -> bool;

    /// Releases orphans without users: their space can be reused when this returns.
    fn release_orphans(&self, nodes: &[Node]);

    /// Releases one orphan without users.
    fn release_orphan(&self, node: Node);
}

/// Data that follows a request's first bytes.
#[derive(Clone, Copy, Debug)]
pub enum RequestData<'a> {
    /// Bytes, possibly none.
    Bytes(&'a [u8]),
    /// Data that was read into a pool buffer.
    Buffer(&'a Arc<PoolBuffer>),
}

/// Outcome of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestOutcome {
    /// Errno of the answer; 0 for success.
    pub errno: i32,
    /// Number of bytes written, for writes.
    pub written_bytes: u32,
}

/// A request whose answer is sent after its thread has moved on.
#[derive(Debug)]
pub struct DeferredRequest(pub u64);

/// A request that changed the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedRequest {
    /// Position in the oplog.
    pub position: u64,
    /// Identifier of its answer.
    pub unique: u64,
    /// Its bytes, without pool-buffer data if the tree has accepted the change.
    pub request: Vec<u8>,
    /// Node that it created.
    pub created: Option<Node>,
    /// Outcome, unless the server died before it was recorded.
    pub outcome: Option<RequestOutcome>,
    /// True if the tree already has its changes.
    pub is_accepted: bool,
    /// True if it was certainly answered.
    pub answered: bool,
}
