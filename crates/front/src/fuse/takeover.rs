//! What a server takes over from one that died.
//!
//! ```text
//!   log of the one before ── changes that are nowhere else ──▶ done again, into a pipe
//!                         └─ what the tree has already ──────▶ only answered
//!   answers that may not have been given ◀── asked for again by the kernel (RESENT)
//! ```
//! Law: each request is done once and answered once. One that was never answered comes again,
//! before any that was not asked for yet; then no other will.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use draconis_exchange::contract::directory::GetAttributes;
use draconis_exchange::contract::recorder::{Inherited, Recorder};
use draconis_exchange::contract::tree::Tree;
use draconis_exchange::contract::{Kept, Kind, Node};
use draconis_exchange::omission::Omission;
use rustix::io::Errno;

use super::activity::Activity;
use super::notifier::{Late, Notifier};
use super::opening;
use super::raw::{Header, Outcome, RESENT};
use super::reply::{self, Bytes, Reply};
use super::request::Request;
use super::serve::{Server, Turns, reply_to};

/// The longest answer to a change, in bytes, with what is told beside it.
const ANSWER_BYTES: usize = 4096;

/// Answers that were not given, for all that is known.
#[derive(Default)]
pub(super) struct Answers {
    /// By the number of the request.
    waiting: Mutex<HashMap<u64, Vec<u8>>>,
    /// Nodes without names that those speak of: the kernel may not have heard of them.
    untold: Mutex<Vec<Node>>,
    /// The kernel may ask for some.
    are_expected: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Answers {
    /// Gives the answer that a request waits for; whether there was one.
    pub(super) fn give(&self, fuse: impl AsFd, header: Header) -> bool {
        if Omission::KeptAnswers.is_made() {
            return false;
        }
        let Some(mut answer) = lock(&self.waiting).remove(&(header.unique & !RESENT)) else {
            return false;
        };
        // The kernel knows it by the number with which it asked now.
        if let Some(unique) = answer.get_mut(8..16) {
            unique.copy_from_slice(&header.unique.to_ne_bytes());
        }
        if let Err(error) = rustix::io::write(fuse, &answer) {
            log::debug!("a reply was not taken: {error}");
        }
        true
    }

    /// A request was read: once it is a new one, no other answer will be asked for. What wants
    /// no answer has a queue of its own in the kernel.
    pub(super) fn expect(
        &self,
        recorder: Option<&dyn Recorder>,
        header: Header,
        notifier: &Notifier,
    ) {
        let is_new = !header.is_resent() && header.wants_answer();
        if !is_new || !self.are_expected.load(Ordering::Relaxed) {
            return;
        }
        self.are_expected.store(false, Ordering::Relaxed);
        lock(&self.waiting).clear();
        let Some(recorder) = recorder else { return };
        recorder.settled();
        let untold = std::mem::take(&mut *lock(&self.untold));
        let nameless = recorder.nameless().into_iter().filter(|node| !untold.contains(node));
        nameless.for_each(|node| notifier.send(Late::Ask(node)));
    }
}

impl<T: Tree + Sync> Server<'_, T> {
    /// Does again what a server before this one has done and the tree does not have, and asks
    /// the kernel for what was not answered.
    pub(super) fn take_over(&self, fuse: impl AsFd) {
        let Some(recorder) = self.recorder else { return };
        let inherited = match recorder.inherited() {
            Ok(Some(inherited)) => inherited,
            Ok(None) => return,
            Err(why) => {
                recorder.contradicted(&why);
                vec![]
            }
        };
        inherited.iter().for_each(|one| self.inherit(recorder, one));
        self.pages.are_unknown();
        self.answers.are_expected.store(true, Ordering::Relaxed);
        if Omission::Resend.is_made() {
            return;
        }
        match rustix::io::write(fuse, Reply::resend().as_bytes()) {
            Ok(_) => {}
            // Before Linux 6.9: what was read and not answered ended with the one who read it.
            Err(Errno::INVAL) => log::debug!("requests that were in hand have ended"),
            // It was unmounted: there is no request.
            Err(error) => log::debug!("nothing is sent again: {error}"),
        }
    }

    fn inherit(&self, recorder: &dyn Recorder, inherited: &Inherited) {
        let request = &inherited.request;
        let header = Header::of(request).filter(|header| header.changes(request));
        let Some(header) = header else {
            return recorder.contradicted("its log has a request that changes nothing");
        };
        if !inherited.taken && Omission::Repeats.is_made() {
            return;
        }
        let answer = if inherited.taken {
            self.answer_to(header, inherited)
        } else {
            self.do_again(recorder, header, inherited)
        };
        let Some(answer) = answer.filter(|_| !inherited.answered) else { return };
        if let Some(made) = inherited.made {
            lock(&self.answers.untold).push(made);
        }
        lock(&self.answers.waiting).insert(inherited.unique, answer);
    }

    /// The answer to a request whose change the tree has.
    fn answer_to(&self, header: Header, inherited: &Inherited) -> Option<Vec<u8>> {
        let outcome = header.outcome(&inherited.request);
        let node = match outcome {
            Outcome::Again => return None,
            Outcome::Nothing => {
                return Some(reply_to(header, Ok(Bytes::default())).as_bytes().to_vec());
            }
            Outcome::Linked(node) => Some(node),
            Outcome::Made | Outcome::MadeAndOpened => inherited.made,
        };
        let of = |node| self.tree.get_attributes(&mut GetAttributes { node }).ok();
        let answer = node.and_then(of).map(|attributes| {
            let names_last = of(header.node).map_or(0, |dir| reply::names_last_seconds(&dir));
            match outcome {
                Outcome::MadeAndOpened => {
                    let flags = opening::flags(Kind::File, Kept::Valid);
                    reply::made_and_opened(&attributes, names_last, flags)
                }
                _ => reply::made(&attributes, names_last),
            }
        });
        Some(reply_to(header, answer.ok_or(Errno::IO)).as_bytes().to_vec())
    }

    /// Makes the change of a request again; its answer.
    fn do_again(
        &self,
        recorder: &dyn Recorder,
        header: Header,
        inherited: &Inherited,
    ) -> Option<Vec<u8>> {
        let (told, tell) = recorder.pipe();
        if recorder.refuses(inherited.unique) {
            recorder.contradicted("a change that was made ends the worker that makes it again");
            return None;
        }
        let Some(mut request) = Request::again(&inherited.request) else {
            recorder.contradicted("its log has a request that is too long");
            return None;
        };
        let (activity, (notifier, _late)) = (Activity::default(), Notifier::new());
        let turns = Turns::new(self, tell, &activity, &notifier);
        recorder.repeat(inherited, &mut || turns.work(header, &mut request));
        let answer = answer_in(told, header.unique);
        let error = answer.as_deref().and_then(|it| it.get(4..)?.first_chunk());
        match error.copied().map(i32::from_ne_bytes) {
            Some(0) => {}
            Some(errno) => {
                let error = io::Error::from_raw_os_error(-errno);
                recorder.contradicted(&format!("a change that was made cannot be made: {error}"));
            }
            None => recorder.contradicted("a change that was made has no answer"),
        }
        answer
    }
}

/// The answer to `unique` among what was told.
fn answer_in(told: &OwnedFd, unique: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; ANSWER_BYTES];
    let len = rustix::io::read(told, &mut bytes[..]).ok()?;
    let mut rest = bytes.get(..len)?;
    loop {
        let len = u32::from_ne_bytes(*rest.first_chunk()?) as usize;
        let (message, behind) = rest.split_at_checked(len.max(16))?;
        if message.get(8..16)? == unique.to_ne_bytes() {
            return Some(message.to_vec());
        }
        rest = behind;
    }
}
