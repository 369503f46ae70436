//! Pending reads in disk order: next is the first at or after the end of the last one, else the
//! first of the disk.

use std::collections::BTreeMap;

use draconis_types::Block;

use crate::{Extent, Promise, ReadAnswer};

/// One read and the promise of its answer.
#[derive(Debug)]
pub(crate) struct ReadRequest {
    pub(crate) at: Extent,
    pub(crate) into: Block,
    pub(crate) promise: Promise<ReadAnswer>,
}

/// Maximum bytes of neighbours that are read together.
const MAX_RUN_BYTES: u64 = 512 << 10;
/// Maximum requests that are read together.
const MAX_RUN_REQUESTS: usize = 64;

/// Requests in disk order.
#[derive(Debug, Default)]
pub(crate) struct Elevator {
    waiting: BTreeMap<(u64, u64), ReadRequest>,
    waiting_bytes: u64,
    /// Number of requests that start where another one ends.
    neighbours: u64,
    arrivals: u64,
    head_bytes: u64,
}

impl Elevator {
    pub(crate) fn push(&mut self, request: ReadRequest) {
        // The arrival number distinguishes requests for the same offset.
        self.arrivals += 1;
        self.waiting_bytes += request.at.len_bytes;
        let key = (request.at.start_bytes, self.arrivals);
        self.neighbours -= self.adjacent_requests_at(key);
        self.waiting.insert(key, request);
        self.neighbours += self.adjacent_requests_at(key);
    }

    pub(crate) fn pop(&mut self) -> Option<ReadRequest> {
        let ahead = self.waiting.range((self.head_bytes, 0)..).next();
        let key = *ahead.or_else(|| self.waiting.first_key_value())?.0;
        self.remove_request(&key)
    }

    fn remove_request(&mut self, key: &(u64, u64)) -> Option<ReadRequest> {
        self.neighbours -= self.adjacent_requests_at(*key);
        let request = self.waiting.remove(key);
        self.neighbours += self.adjacent_requests_at(*key);
        let request = request?;
        self.waiting_bytes -= request.at.len_bytes;
        self.head_bytes = request.at.end_bytes().unwrap_or(0);
        Some(request)
    }

    /// Returns the number of pending requests.
    pub(crate) fn len(&self) -> u64 {
        self.waiting.len() as u64
    }

    /// Returns the minimum number of runs that the pending requests form.
    pub(crate) fn min_run_count(&self) -> u64 {
        self.waiting_bytes.div_ceil(MAX_RUN_BYTES).max(self.len() - self.neighbours)
    }

    /// Returns how many of the request at `key` and its two neighbours start where the previous one
    /// ends.
    fn adjacent_requests_at(&self, key: (u64, u64)) -> u64 {
        let before = self.waiting.range(..key).next_back();
        let from =
            self.waiting.range(key..).take(if self.waiting.contains_key(&key) { 2 } else { 1 });
        let mut end = None;
        let follows = |((start, _), it): (&(u64, u64), &ReadRequest)| {
            let follows = end == Some(*start);
            end = it.at.end_bytes();
            u64::from(follows)
        };
        before.into_iter().chain(from).map(follows).sum()
    }

    /// Removes the next request and those that follow it without a gap.
    pub(crate) fn pop_run(&mut self) -> Vec<ReadRequest> {
        let mut run: Vec<ReadRequest> = self.pop().into_iter().collect();
        let mut bytes = run.first().map_or(0, |first| first.at.len_bytes);
        while let Some(entry) = self.waiting.range((self.head_bytes, 0)..).next() {
            let (key, at) = (*entry.0, entry.1.at);
            let fits = bytes + at.len_bytes <= MAX_RUN_BYTES && run.len() < MAX_RUN_REQUESTS;
            if run.is_empty() || at.start_bytes != self.head_bytes || !fits {
                break;
            }
            bytes += at.len_bytes;
            run.extend(self.remove_request(&key));
        }
        run
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::promise_pair;

    #[test]
    fn elevator_pops_ascending_then_wraps() {
        let mut elevator = Elevator::default();
        let mut push = |start| {
            let (promise, _) = promise_pair();
            let at = Extent::new(start, 10);
            elevator.push(ReadRequest { at, into: Block::private(0), promise });
        };
        [50, 10, 90, 10].into_iter().for_each(&mut push);
        let order: Vec<u64> =
            std::iter::from_fn(|| elevator.pop()).map(|r| r.at.start_bytes).collect();
        assert_eq!(order, [10, 50, 90, 10]);
    }

    #[test]
    fn pop_run_returns_adjacent_requests() {
        let mut elevator = Elevator::default();
        for start in [30, 10, 20, 50, 60, 60] {
            let (promise, _) = promise_pair();
            let at = Extent::new(start, 10);
            elevator.push(ReadRequest { at, into: Block::private(0), promise });
        }
        let runs: Vec<usize> =
            std::iter::from_fn(|| Some(elevator.pop_run().len()).filter(|len| *len > 0)).collect();
        assert_eq!(runs, [3, 2, 1]);
    }

    /// Counted as they are added and removed, and one after the other.
    #[test]
    fn run_count_follows_pending_requests() {
        let (mut elevator, mut random) = (Elevator::default(), crate::Random::new(3));
        for round in 0..4000 {
            if round / 200 % 2 == 0 || elevator.pop().is_none() {
                let (promise, _) = promise_pair();
                let at = Extent::new(random.next_below(60) * 5, 5 + 5 * random.next_below(2));
                elevator.push(ReadRequest { at, into: Block::private(0), promise });
            }
            let all: Vec<Extent> = elevator.waiting.values().map(|it| it.at).collect();
            let joined =
                all.windows(2).filter(|pair| pair[0].end_bytes() == Some(pair[1].start_bytes));
            assert_eq!(elevator.min_run_count(), (all.len() - joined.count()) as u64);
        }
    }
}
