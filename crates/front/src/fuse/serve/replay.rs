//! Replay of the oplog after a worker died.
//!
//! ```text
//!   inherited oplog ── changes that the tree lacks ──▶ applied again ──▶ pending replies
//!                   └─ changes that the tree has ────▶ reply rebuilt ──▶ pending replies
//!   pending replies ◀── the kernel resends unanswered requests (UNIQUE_RESEND)
//! ```
//! Law 1: each request is applied once and answered once. The kernel resends all requests that were
//! never answered before it sends a new one; after that it resends none.
//! Law 2: a replay ends as the change did. A change that failed is not replayed; one that succeeded
//! and fails in the replay makes the volume read-only.
//! Law 3: an error that made the volume read-only does so again, after the replay.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use draconis_exchange::contract::request_log::{LoggedRequest, RequestLog, RequestOutcome};
use draconis_exchange::contract::tree::Tree;
use draconis_types::Node;
use draconis_types::injected_fault::InjectedFault;
use draconis_types::lock::Mutex;
use rustix::io::Errno;

use super::change::ChangeReply;
use super::{Connection, Server};
use crate::fuse::decoder::{Header, UNIQUE_RESEND};
use crate::fuse::notify::{Notifier, NotifyTask};
use crate::fuse::reply::Reply;
use crate::fuse::request::Request;

/// Timeout for the kernel's answer whether it has a node, before requests are served: it writes
/// dirty pages back before it forgets a file, which needs replies.
const UNUSED_PROBE_TIMEOUT: Duration = Duration::from_millis(100);

/// Answers that may not have reached the kernel.
#[derive(Default)]
pub(super) struct PendingReplies {
    /// By the id of the request.
    by_request: Mutex<HashMap<u64, ChangeReply>>,
    /// Orphans that those answers create: the kernel may not know them.
    unannounced_orphans: Mutex<Vec<Node>>,
    /// True while the kernel may resend requests.
    is_resend_possible: AtomicBool,
}

impl PendingReplies {
    /// Sends the pending answer of a resent request. Returns false if there is none.
    pub(super) fn send_pending(&self, link: &Connection<'_>, header: Header) -> bool {
        if InjectedFault::PendingReplies.is_made() {
            return false;
        }
        let Some(answer) = self.by_request.lock().remove(&(header.unique & !UNIQUE_RESEND)) else {
            return false;
        };
        // The reply must have the id of the resent request.
        let reply = answer.reply.clone().with_unique(header.unique);
        link.send_change_reply(header, ChangeReply { reply, ..answer });
        true
    }

    /// Handles a request that was read. A new one ends all resends. Requests without replies have
    /// their own queue in the kernel, and tell nothing.
    pub(super) fn note_request(
        &self,
        recorder: Option<&dyn RequestLog>,
        header: Header,
        notifier: &Notifier,
    ) {
        let is_new = !header.is_resent() && header.wants_reply();
        if !is_new || !self.is_resend_possible.load(Ordering::Relaxed) {
            return;
        }
        self.is_resend_possible.store(false, Ordering::Relaxed);
        self.by_request.lock().clear();
        let Some(recorder) = recorder else { return };
        recorder.end_replay();
        let unannounced_orphans = std::mem::take(&mut *self.unannounced_orphans.lock());
        let orphans =
            recorder.orphans().into_iter().filter(|node| !unannounced_orphans.contains(node));
        orphans.for_each(|node| notifier.send(NotifyTask::CheckOrphan(node)));
    }
}

impl<T: Tree + Sync> Server<'_, T> {
    /// Replays the changes of earlier servers that the tree lacks, and has the kernel resend
    /// unanswered requests.
    pub(super) fn replay_oplog(&self, fuse: impl AsFd) {
        let Some(recorder) = self.recorder else { return };
        let inherited = match recorder.unfinished_requests() {
            Ok(Some(inherited)) => inherited,
            Ok(None) => return,
            Err(why) => {
                recorder.fail_replay(&why);
                vec![]
            }
        };
        self.pages.insert_all();
        for (at, one) in inherited.iter().enumerate() {
            self.replay_entry(&fuse, recorder, one, &inherited[at + 1..]);
        }
        recorder.finish_replay();
        self.pending_replies.is_resend_possible.store(true, Ordering::Relaxed);
        if InjectedFault::Resend.is_made() {
            return;
        }
        match rustix::io::write(fuse, Reply::resend_notification().as_bytes()) {
            Ok(_) => {}
            // Before Linux 6.9, unanswered requests ended with the server that had read them.
            Err(Errno::INVAL) => log::debug!("requests that were in hand have ended"),
            // It was unmounted: there are no requests.
            Err(error) => log::debug!("nothing is sent again: {error}"),
        }
    }

    fn replay_entry(
        &self,
        fuse: impl AsFd,
        recorder: &dyn RequestLog,
        inherited: &LoggedRequest,
        later: &[LoggedRequest],
    ) {
        let request = &inherited.request;
        let header = Header::parse(request).filter(|header| header.is_mutation(request));
        let Some(header) = header else {
            return recorder.fail_replay("its log has a request that changes nothing");
        };
        if !inherited.is_accepted && InjectedFault::Repeats.is_made() {
            return;
        }
        let answer = if inherited.is_accepted {
            self.rebuild_reply(header, request, inherited.created, inherited.outcome)
        } else {
            self.replay_change(fuse, recorder, header, inherited, later)
        };
        let Some(answer) = answer.filter(|_| !inherited.answered) else { return };
        if let Some(made) = inherited.created {
            self.pending_replies.unannounced_orphans.lock().push(made);
        }
        self.pending_replies.by_request.lock().insert(inherited.unique, answer);
    }

    /// Applies a change again that the tree lacks; returns its answer.
    fn replay_change(
        &self,
        fuse: impl AsFd,
        recorder: &dyn RequestLog,
        header: Header,
        inherited: &LoggedRequest,
        later: &[LoggedRequest],
    ) -> Option<ChangeReply> {
        if recorder.is_quarantined(inherited.unique) {
            recorder.fail_replay("a change that was made ends the worker that makes it again");
            return None;
        }
        let Some(mut request) = Request::from_bytes(&inherited.request) else {
            recorder.fail_replay("its log has a request that is too long");
            return None;
        };
        if let Some(outcome) = inherited.outcome.filter(|_| header.has_write_data()) {
            request.shorten_write(outcome.written_bytes);
        }
        let mut answer = None;
        recorder.replay(inherited, &mut || {
            let mut applied = self.apply_request(header, &mut request);
            if find_log_contradiction(header, inherited.outcome, applied.outcome).is_some() {
                self.release_unused_orphans(&fuse, recorder, later);
                applied = self.apply_request(header, &mut request);
            }
            if inherited.outcome.is_none() {
                recorder.record_outcome(applied.outcome);
            }
            answer = Some(applied);
        });
        let answer = answer?;
        if let Some(why) = find_log_contradiction(header, inherited.outcome, answer.outcome) {
            recorder.fail_replay(&why);
        }
        Some(answer)
    }

    /// Deletes orphans without users. The previous worker may have deleted them and reused their
    /// space, and the oplog does not record deletions.
    fn release_unused_orphans(
        &self,
        fuse: impl AsFd,
        recorder: &dyn RequestLog,
        later: &[LoggedRequest],
    ) {
        let unannounced_orphans = self.pending_replies.unannounced_orphans.lock().clone();
        let nodes =
            recorder.orphans().into_iter().filter(|node| !unannounced_orphans.contains(node));
        let forgotten = nodes.filter(|node| match find_next_use(later, *node) {
            NextNodeUse::SameNode => false,
            NextNodeUse::NewNode => true,
            NextNodeUse::None => self.is_unused(&fuse, *node, Some(UNUSED_PROBE_TIMEOUT)),
        });
        recorder.release_orphans(&forgotten.collect::<Vec<_>>());
    }

    /// Returns true if the kernel does not have a node, which then has no user. Without an answer
    /// of the kernel within `wait`, it counts as used.
    pub(super) fn is_unused(&self, fuse: impl AsFd, node: Node, wait: Option<Duration>) -> bool {
        let asked = self.notify(fuse, &Reply::invalidate_attributes(node), wait);
        asked == Err(Errno::NOENT) || InjectedFault::KeepOpenOrphans.is_made()
    }
}

/// How the following changes use a node.
enum NextNodeUse {
    None,
    /// They change it.
    SameNode,
    /// They give its number to a new node: it was deleted before.
    NewNode,
}

fn find_next_use(later: &[LoggedRequest], node: Node) -> NextNodeUse {
    later
        .iter()
        .find_map(|one| {
            if uses_node(&one.request, node) {
                Some(NextNodeUse::SameNode)
            } else {
                (one.created == Some(node)).then_some(NextNodeUse::NewNode)
            }
        })
        .unwrap_or(NextNodeUse::None)
}

/// Returns true if a request names `node`.
fn uses_node(request: &[u8], node: Node) -> bool {
    Header::parse(request)
        .is_some_and(|header| header.node == node || header.linked_node(request) == Some(node))
}

/// Returns how the outcome of a replay contradicts the original change, if it does.
fn find_log_contradiction(
    header: Header,
    recorded: Option<RequestOutcome>,
    replayed: RequestOutcome,
) -> Option<String> {
    // The worker may have died between two steps, and the next step finds no space: no caller was
    // told that the change succeeded.
    let may_be_partial = recorded.is_none() && header.is_multi_step();
    let wants_space = replayed.errno == Errno::NOSPC.raw_os_error();
    if replayed.errno != 0 && !(may_be_partial && wants_space) {
        let error = io::Error::from_raw_os_error(replayed.errno);
        let what = header.describe();
        return Some(format!("a change that was made cannot be made again: {what}: {error}"));
    }
    let lacks = recorded.filter(|recorded| replayed.written_bytes < recorded.written_bytes)?;
    Some(format!(
        "of {} bytes that were written only {} can be written again: {}",
        lacks.written_bytes,
        replayed.written_bytes,
        header.describe()
    ))
}
