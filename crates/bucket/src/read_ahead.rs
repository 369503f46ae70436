//! Read-ahead for sequential readers of objects.
//!
//! ```text
//!   read, read, read ─▶ in order: a window, each twice as long ─▶ the rest of the object
//!                                 the next one is asked for while this one is read
//!                                 behind the end of an object it is the next object's begin
//! ```
//!
//! Objects are immutable, so cached bytes never become stale.
//!
//! Law 1: each window is requested once. A reader requests a queued window itself and waits only
//! for a request in flight.
//! Law 2: a failed window is dropped: readers request their own ranges.
//! Law 3: cached windows are bounded, and dropped once they are read to their end.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use draconis_types::lock::{Condvar, Mutex};

/// First window, in bytes: worth a request, and a small loss if no read follows.
const FIRST_WINDOW_BYTES: u64 = 256 << 10;
/// Longest window, in bytes: its transfer takes longer than the latency of a request.
pub(crate) const MAX_WINDOW_BYTES: u64 = 1 << 20;
/// Most cached windows.
const MAX_WINDOWS: usize = 24;
/// Most sequential readers that are tracked.
const MAX_STREAMS: usize = 16;
/// Largest gap between sequential reads: a header, or bytes that were in memory.
const MAX_GAP_BYTES: u64 = 64 << 10;
/// Windows requested ahead of a reader.
const WINDOWS_AHEAD: usize = 3;

/// A range of an object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ObjectRange {
    pub key: Arc<str>,
    pub from: u64,
    pub len: u64,
}

impl ObjectRange {
    fn end(&self) -> u64 {
        self.from + self.len
    }

    fn contains(&self, other: &Self) -> bool {
        self.key == other.key && self.from <= other.from && other.end() <= self.end()
    }
}

enum WindowState {
    Queued,
    /// A request is in flight.
    Requested,
    Received(Bytes),
}

struct Window {
    span: ObjectRange,
    state: WindowState,
}

/// A sequential reader.
struct SequentialReader {
    /// Key and range of its last read.
    key: Arc<str>,
    from: u64,
    at: u64,
    /// Last range that was requested for it.
    ahead: Option<ObjectRange>,
    window: u64,
}

#[derive(Default)]
struct ReadAheadState {
    windows: VecDeque<Window>,
    /// In order of use, the newest last.
    streams: VecDeque<SequentialReader>,
}

/// Read-ahead of objects.
#[derive(Default)]
pub(crate) struct ReadAhead {
    state: Mutex<ReadAheadState>,
    changed: Condvar,
}

/// Action of a reader.
pub(crate) enum ReadAction {
    /// Use these bytes.
    Received(Bytes),
    /// Request this range, which has the wanted one, and [complete](ReadAhead::complete_window) it.
    Ask(ObjectRange),
}

impl ReadAhead {
    /// Returns the action of a reader of `wanted`, and further windows to
    /// [claim](ReadAhead::claim_window). `len_of` and `next` return an object's length and
    /// successor.
    pub fn read(
        &self,
        wanted: &ObjectRange,
        len_of: impl Fn(&str) -> u64,
        next: impl Fn(&str) -> Option<Arc<str>>,
    ) -> (ReadAction, Vec<ObjectRange>) {
        let mut state = self.state.lock();
        let mut more = state.advance_reader(wanted, &len_of, &next);
        while let Some(nth) = state.windows.iter().position(|it| it.span.contains(wanted)) {
            let window = &mut state.windows[nth];
            match &window.state {
                WindowState::Received(bytes) => {
                    let from = (wanted.from - window.span.from) as usize;
                    let bytes = bytes.slice(from..from + wanted.len as usize);
                    if window.span.end() == wanted.end() {
                        state.windows.remove(nth);
                    }
                    return (ReadAction::Received(bytes), more);
                }
                WindowState::Requested => self.changed.wait(&mut state),
                WindowState::Queued => {
                    window.state = WindowState::Requested;
                    let span = window.span.clone();
                    more.retain(|other| *other != span);
                    return (ReadAction::Ask(span), more);
                }
            }
        }
        (ReadAction::Ask(wanted.clone()), more)
    }

    /// Claims a queued window for a request by the caller; returns false if it is not queued.
    pub fn claim_window(&self, span: &ObjectRange) -> bool {
        let mut state = self.state.lock();
        let window = state.windows.iter_mut().find(|window| window.span == *span);
        let waits = window.filter(|window| matches!(window.state, WindowState::Queued));
        waits.map(|window| window.state = WindowState::Requested).is_some()
    }

    /// Completes a requested window, or drops it after a failure.
    pub fn complete_window(&self, span: &ObjectRange, came: Option<&Bytes>) {
        let mut state = self.state.lock();
        let nth = state.windows.iter().position(|window| window.span == *span);
        if let Some(nth) = nth {
            match came {
                Some(bytes) => state.windows[nth].state = WindowState::Received(bytes.clone()),
                None => drop(state.windows.remove(nth)),
            }
        }
        self.changed.notify_all();
    }
}

impl ReadAheadState {
    /// Moves a reader to `wanted`; returns the windows that it will need, which are queued now.
    fn advance_reader(
        &mut self,
        wanted: &ObjectRange,
        len_of: &impl Fn(&str) -> u64,
        next: &impl Fn(&str) -> Option<Arc<str>>,
    ) -> Vec<ObjectRange> {
        let is_next = |stream: &SequentialReader| match stream.key == wanted.key {
            true => (stream.at..=stream.at + MAX_GAP_BYTES).contains(&wanted.from),
            // At the end of an object it continues with the next.
            false => {
                wanted.from <= MAX_GAP_BYTES
                    && stream.at + MAX_GAP_BYTES >= len_of(&stream.key)
                    && next(&stream.key).is_some_and(|key| key == wanted.key)
            }
        };
        let found = self.streams.iter().position(is_next);
        let Some(mut stream) = found.and_then(|nth| self.streams.remove(nth)) else {
            if self.streams.len() >= MAX_STREAMS {
                self.streams.pop_front();
            }
            let (key, from, at) = (wanted.key.clone(), wanted.from, wanted.end());
            self.streams.push_back(SequentialReader {
                key,
                from,
                at,
                ahead: None,
                window: FIRST_WINDOW_BYTES,
            });
            return vec![];
        };
        // Windows before `wanted` are read to their end, maybe by a read across it.
        self.windows.retain(|window| {
            let (span, is_same) = (&window.span, stream.key == wanted.key);
            let is_left = span.end() > stream.from && (!is_same || span.end() <= wanted.from);
            span.key != stream.key || !is_left
        });
        (stream.key, stream.from, stream.at) = (wanted.key.clone(), wanted.from, wanted.end());
        let mut more = vec![];
        let behind = next(&wanted.key);
        let is_of = |key: &Arc<str>| *key == wanted.key || behind.as_ref() == Some(key);
        // A new sequential reader begins with the current range.
        let ahead = stream.ahead.take().filter(|last| is_of(&last.key));
        let mut last = ahead.unwrap_or_else(|| ObjectRange { len: 0, ..wanted.clone() });
        let left = |state: &Self| {
            let is_left = |span: &ObjectRange| {
                is_of(&span.key) && (span.key != wanted.key || span.from >= wanted.end())
            };
            state.windows.iter().filter(|window| is_left(&window.span)).count()
        };
        while left(self) < WINDOWS_AHEAD || last.key == wanted.key && last.end() < wanted.end() {
            let (key, from) = match last.end() < len_of(&last.key) {
                true => (last.key.clone(), last.end()),
                // No further than one object.
                false if last.key == wanted.key => match &behind {
                    Some(key) => (key.clone(), 0),
                    None => break,
                },
                false => break,
            };
            // Another reader may have requested it.
            let covers =
                |it: &&Window| it.span.key == key && (it.span.from..it.span.end()).contains(&from);
            if let Some(there) = self.windows.iter().find(covers) {
                last = there.span.clone();
                continue;
            }
            let needed = if key == wanted.key { wanted.end().saturating_sub(from) } else { 0 };
            let len = stream.window.max(needed).min(len_of(&key).saturating_sub(from));
            if len == 0 {
                break;
            }
            stream.window = (stream.window * 2).min(MAX_WINDOW_BYTES);
            last = ObjectRange { key, from, len };
            if self.windows.len() >= MAX_WINDOWS {
                self.windows.pop_front();
            }
            self.windows.push_back(Window { span: last.clone(), state: WindowState::Queued });
            more.push(last.clone());
        }
        stream.ahead = Some(last);
        self.streams.push_back(stream);
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT_LEN: u64 = 4 << 20;

    fn test_range(key: &str, from: u64, len: u64) -> ObjectRange {
        ObjectRange { key: key.into(), from, len }
    }

    fn bytes(span: &ObjectRange) -> Bytes {
        (span.from..span.end()).map(|at| (at >> 9) as u8).collect::<Vec<u8>>().into()
    }

    /// A reader, and its requests to a bucket with two objects, "a" and "b".
    #[derive(Default)]
    struct Reader {
        ahead: ReadAhead,
        asked: Vec<ObjectRange>,
    }

    impl Reader {
        fn read(&mut self, wanted: &ObjectRange) {
            let next = |key: &str| (key == "a").then(|| Arc::from("b"));
            let (step, more) = self.ahead.read(wanted, |_| OBJECT_LEN, next);
            let bytes_here = match step {
                ReadAction::Received(bytes) => bytes,
                ReadAction::Ask(asked) => {
                    assert!(asked.contains(wanted), "{asked:?} for {wanted:?}");
                    self.asked.push(asked.clone());
                    let came = bytes(&asked);
                    self.ahead.complete_window(&asked, Some(&came));
                    let from = (wanted.from - asked.from) as usize;
                    came.slice(from..from + wanted.len as usize)
                }
            };
            assert_eq!(bytes_here, bytes(wanted));
            for window in more {
                if self.ahead.claim_window(&window) {
                    self.asked.push(window.clone());
                    self.ahead.complete_window(&window, Some(&bytes(&window)));
                }
            }
        }
    }

    #[test]
    fn sequential_reads_use_large_requests_once() {
        for (step, gap) in [(64 << 10, 0), (60 << 10, 4 << 10), (5000, 0), (256 << 10, 0)] {
            let mut reader = Reader::default();
            for key in ["a", "b"] {
                let places =
                    (0..).map(|nth| nth * (step + gap)).take_while(|at| at + step <= OBJECT_LEN);
                places.for_each(|at| reader.read(&test_range(key, at, step)));
            }
            let count = reader.asked.len();
            // A range in two windows is requested separately.
            assert!(count <= 24, "{count}: {:?}", reader.asked);
            let all: u64 = reader.asked.iter().map(|span| span.len).sum();
            // The first read, before the sequence was detected, may be repeated.
            assert!(all <= 2 * OBJECT_LEN + 12 * step, "{all}");
            assert!(reader.ahead.state.lock().windows.len() <= 1, "read, and kept");
        }
    }

    #[test]
    fn concurrent_readers_are_independent() {
        let mut reader = Reader::default();
        for nth in 0..32u64 {
            reader.read(&test_range("a", nth << 16, 1 << 16));
            reader.read(&test_range("a", (2 << 20) + (nth << 16), 1 << 16));
        }
        assert!(reader.asked.len() <= 16, "{:?}", reader.asked);
        let mut reader = Reader::default();
        for nth in 0..100u64 {
            reader.read(&test_range("a", nth * 7 % 64 * (65 << 10), 4096));
        }
        assert!(reader.asked.iter().all(|span| span.len == 4096), "{:?}", reader.asked);
    }

    #[test]
    fn failed_read_ahead_is_requested_by_reader() {
        let ahead = ReadAhead::default();
        let read = |at: u64| ahead.read(&test_range("a", at, 1000), |_| OBJECT_LEN, |_| None);
        let (ReadAction::Ask(_), more) = read(0) else { panic!("nothing is there") };
        assert!(more.is_empty());
        let (ReadAction::Ask(first), more) = read(1000) else { panic!("nothing is there") };
        assert_eq!((first.from, first.len, more.len()), (1000, FIRST_WINDOW_BYTES, WINDOWS_AHEAD));
        ahead.complete_window(&first, None);
        let (ReadAction::Ask(again), _) = read(2000) else { panic!("nothing came") };
        assert_eq!(again, test_range("a", 2000, 1000));
        // A reader that needs a queued window claims it.
        let (ReadAction::Ask(second), _) = read(more[0].from) else { panic!("nothing came") };
        assert_eq!(second, more[0]);
        assert!(
            !ahead.claim_window(&more[0])
                && ahead.claim_window(&more[1])
                && !ahead.claim_window(&more[1])
        );
    }
}
