//! One read of adjacent pieces, which are then waited for one by one.
//!
//! ```text
//!   Run: reading ── first waiter ──▶ a buffer for each piece ──▶ taken by the piece's waiter
//! ```
//! Law 1: a run holds no memory of a piece that was taken.
//! Law 2: a run that fails fails all its pieces, and their readers read them alone.

use std::sync::Arc;

use draconis_device::{DeferredAnswer, Pending, ReadAnswer};
use draconis_types::Block;
use draconis_types::lock::Mutex;

use super::pool::Pool;
use crate::units::saturating_usize;

/// Maximum length of a run in bytes.
pub(super) const MAX_RUN_BYTES: u64 = 128 << 10;

/// A read of adjacent pieces.
#[derive(Debug)]
struct Run {
    state: Mutex<RunState>,
    pool: Arc<Pool>,
    piece_bytes: u64,
    count: u64,
}

#[derive(Debug)]
struct RunState {
    /// `None` once it has arrived.
    reading: Option<Pending<ReadAnswer>>,
    /// Pieces that were not taken.
    pieces: Vec<Option<Block>>,
}

/// One piece of a run.
#[derive(Debug)]
struct PieceOfRun {
    run: Arc<Run>,
    index: usize,
}

/// Splits a read of `count` pieces into the answers of the pieces, in order.
pub(super) fn split_run(
    reading: Pending<ReadAnswer>,
    count: u64,
    piece_bytes: u64,
    pool: &Arc<Pool>,
) -> impl Iterator<Item = Pending<ReadAnswer>> {
    let state = Mutex::new(RunState { reading: Some(reading), pieces: vec![] });
    let run = Arc::new(Run { state, pool: pool.clone(), piece_bytes, count });
    (0..saturating_usize(count))
        .map(move |index| Pending::deferred(PieceOfRun { run: run.clone(), index }))
}

impl Run {
    fn split(&self, whole: &Block) -> Vec<Option<Block>> {
        let piece = |nth: u64| {
            let mut piece = self.pool.acquire(saturating_usize(self.piece_bytes));
            let at = saturating_usize(nth.saturating_mul(self.piece_bytes));
            whole.copy_out(at, piece.bytes_mut()?);
            Some(piece)
        };
        (0..self.count).map(piece).collect()
    }
}

impl DeferredAnswer<ReadAnswer> for PieceOfRun {
    fn is_ready(&self) -> bool {
        // Locked: its waiter waits for the device.
        let state = self.run.state.try_lock();
        state.is_some_and(|state| state.reading.as_ref().is_none_or(Pending::is_ready))
    }

    fn wait(self: Box<Self>) -> Option<ReadAnswer> {
        let mut state = self.run.state.lock();
        if let Some(reading) = state.reading.take()
            && let Some(Ok(whole)) = reading.wait()
        {
            state.pieces = self.run.split(&whole);
        }
        state.pieces.get_mut(self.index)?.take().map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use draconis_device::{Disk, Error, Extent, MemoryDisk, Refused, Urgency};

    use super::*;
    use crate::FsBlock;
    use crate::blocks::BlockStore;
    use crate::blocks::role::Role;

    /// A disk that counts its reads, and fails those of several blocks if `refuses` is set.
    struct CountingDisk {
        inner: MemoryDisk,
        reads: AtomicU64,
        refuses: bool,
    }

    impl draconis_device::ForwardingDisk for CountingDisk {
        type Inner = MemoryDisk;

        fn inner_disk(&self) -> &MemoryDisk {
            &self.inner
        }

        fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            if self.refuses && at.len_bytes > 4096 {
                let error = Error::ServiceEnded;
                return Pending::ready(Err(Refused { payload: Some(into), error }));
            }
            self.inner.read(at, into, urgency)
        }
    }

    #[test]
    fn run_is_one_read_and_its_pieces_survive_a_failure() {
        let bytes: Vec<u8> = (0..64 * 4096_u32).map(|at| (at / 4096) as u8).collect();
        for refuses in [false, true] {
            let inner = MemoryDisk::new(bytes.clone(), 512);
            let disk = Arc::new(CountingDisk { inner, reads: AtomicU64::new(0), refuses });
            let store = BlockStore::new(disk.clone(), 4096, 4 << 20, 0).with_small_pieces(4 << 20);
            // Runs of 32, 8 and 2 blocks, the last to the end of the disk, and one block alone.
            let wanted = || (0..40).chain(50..51).chain(62..64);
            store.prefetch(wanted().collect());
            assert_eq!(disk.reads.load(Ordering::Relaxed), 4);
            // Nothing is read twice.
            store.prefetch(wanted().collect());
            for block in wanted().rev() {
                let read = store.block(FsBlock(block), Role::Contents).unwrap();
                assert!(read.len() == 4096 && read.iter().all(|byte| u64::from(*byte) == block));
            }
            let alone = if refuses { 42 } else { 0 };
            assert_eq!(disk.reads.load(Ordering::Relaxed), 4 + alone);
        }
    }
}
