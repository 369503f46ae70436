//! Read-ahead: reads that have no waiter yet, queued and served in disk order
//! ([`Elevator`]) by a ring or by threads.
//!
//! Foreground reads never enter the queue, they go to the device in their caller's thread.
//! A thread takes neighbours together: one large request, scattered into their blocks,
//! wakes its waiter once.

use std::sync::Arc;

use draconis_exchange::heap::Block;

use crate::elevator::{Elevator, Request};
use crate::raw::RawFile;
use crate::readers::{Readers, Reads};
use crate::uring::Ring;
use crate::{Extent, Pending, ReadAnswer, pending};

/// Serves reads ahead of their use.
#[derive(Debug)]
pub(crate) enum Ahead {
    /// Up to a ring's depth in flight.
    Uring(Ring),
    /// A few threads that read.
    Threads(Readers<RawFile>),
}

impl Ahead {
    pub(crate) fn start(file: Arc<RawFile>, uring: bool) -> Self {
        if uring {
            match Ring::start(file.clone()) {
                Ok(ring) => return Self::Uring(ring),
                Err(error) => log::info!("no io_uring here ({error}): a thread reads ahead"),
            }
        }
        Self::Threads(Readers::new(file, READERS))
    }

    pub(crate) fn uses_uring(&self) -> bool {
        matches!(self, Self::Uring(_))
    }

    pub(crate) fn read(&self, at: Extent, into: Block) -> Pending<ReadAnswer> {
        let (promise, answer) = pending();
        let request = Request { at, into, promise };
        match self {
            Self::Uring(ring) => ring.read(request),
            Self::Threads(readers) => readers.read(request),
        }
        answer
    }
}

/// As many requests as these are in flight at once.
const READERS: usize = 8;

/// One request for all neighbours where that is possible; each for itself where it is not, or
/// if it failed: then some may still succeed.
impl Reads for RawFile {
    fn take(elevator: &mut Elevator) -> Vec<Request> {
        elevator.pop_run()
    }

    fn shares(elevator: &Elevator) -> u64 {
        elevator.runs()
    }

    fn answer(&self, mut run: Vec<Request>) {
        let start_bytes = run.first().map_or(0, |first| first.at.start_bytes);
        let together = run.len() > 1
            && self.read_scattered(start_bytes, run.iter_mut().map(|it| &mut it.into));
        for Request { at, into, promise } in run {
            promise.keep(if together { Ok(into) } else { self.read(at, into) });
        }
    }
}
