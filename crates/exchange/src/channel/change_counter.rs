//! What a server tells without a message: that what it answered before may have changed.
//!
//! ```text
//!   server's side:  tell() ── one more ──▶ a count that both sides see ──▶ told():  client's side
//! ```
//! A client that keeps an answer looks at the count before it asks, and before each use: while the
//! two agree, and the server lives, the answer is as good as a new one.
//!
//! Law 1: a server that tells does so before an answer of its, to any client, shows what changed.
//! Law 2: of a server that does not tell a client keeps nothing: its count is none.
//! Law 3: a count says nothing of its own. A server that lies with it costs its client a message,
//! or has it read what the server might have answered as well.
//! Law 4: a dead server tells nothing, so its client looks for it: every [`LIVENESS_CACHE_MS`].

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use super::session::Session;

/// For how many milliseconds a peer that was seen alive is held to be: about as long, and no
/// longer than a tick of the clock more, what a dead one answered may be used.
pub(super) const LIVENESS_CACHE_MS: u64 = 10;

/// The server's hand on the count of one channel. It outlives the end, and does nothing then.
#[derive(Clone, Debug)]
pub struct ChangeNotifier(Arc<Mutex<Option<CounterState>>>);

#[derive(Debug)]
struct CounterState {
    /// Only this side's own number is believed: what is shared can be written by the client.
    count: u64,
    word: CounterCell,
}

#[derive(Debug)]
enum CounterCell {
    Lane { session: Arc<Session>, at: usize },
    Here(Arc<AtomicU64>),
}

impl CounterCell {
    fn get(&self) -> &AtomicU64 {
        match self {
            Self::Lane { session, at } => session.shared().atomic_u64(*at),
            Self::Here(count) => count,
        }
    }
}

impl ChangeNotifier {
    /// Counts on from `first` in the word at `at`, which is not 0.
    pub(super) fn for_lane(session: &Arc<Session>, at: usize, first: u64) -> Self {
        Self::begin(first, CounterCell::Lane { session: session.clone(), at })
    }

    pub(super) fn for_thread(count: &Arc<AtomicU64>) -> Self {
        Self::begin(1, CounterCell::Here(count.clone()))
    }

    fn begin(count: u64, word: CounterCell) -> Self {
        word.get().store(count, SeqCst);
        Self(Arc::new(Mutex::new(Some(CounterState { count, word }))))
    }

    /// Says that what was answered before may not be so any more; whether there is a client that
    /// can hear it.
    pub fn notify_change(&self) -> bool {
        let mut count = self.lock();
        let Some(CounterState { count, word }) = &mut *count else { return false };
        *count += 1;
        word.get().store(*count, SeqCst);
        true
    }

    /// Whether the server's end is open.
    pub fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    /// The end was closed: the word may be another's from now on.
    pub(super) fn close(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<CounterState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
