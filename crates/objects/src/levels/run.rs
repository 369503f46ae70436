//! Sorted runs: sorted pairs on the disk, in chunks that are read separately.
//!
//! ```text
//!   part   what differs from the key before, entry · ..
//! ```
//!
//! Law: a run is accounted: the older entries it hides in runs and the tree are dead.

use std::sync::Arc;

use crate::Result;
use crate::codec::Reader;
use crate::entry::{Entry, Key, decoded_len_max, put_key_delta, read_pair_delta};
use crate::index::memtable::ImmutableMemtable;
use crate::index::tree::BlockPtr;
use crate::log::LogWriter;

/// A flushed memtable, in memory and on the disk.
pub(crate) struct SortedRun {
    /// None if the memtable of an older run, or of the merge, includes its pairs.
    pub layer: Option<Arc<ImmutableMemtable>>,
    pub chunks: Vec<BlockPtr>,
}

/// Encoder of pairs to chunks; no pair is in two.
#[derive(Debug, Default)]
pub(crate) struct ChunkWriter {
    /// Chunks that were stored.
    pub stored: Vec<BlockPtr>,
    bytes: Vec<u8>,
    /// Last key of the chunk, and the length of all its keys.
    last: Key,
    keys_bytes: usize,
    /// Number of encoded pairs.
    taken: usize,
}

impl ChunkWriter {
    /// Encodes the pairs that were not encoded yet.
    pub fn encode_new_pairs(&mut self, log: &mut LogWriter, pairs: &[(Key, Entry)]) -> Result<()> {
        let limit = log.layout.chunk_bytes();
        let mut pair = vec![];
        for (key, entry) in pairs.get(self.taken..).unwrap_or_default() {
            pair.clear();
            put_key_delta(&mut pair, &self.last, key);
            entry.encode(&mut pair);
            let len = self.bytes.len().saturating_add(pair.len());
            let is_full =
                len > limit || self.keys_bytes.saturating_add(key.len()) > decoded_len_max(len);
            if !self.bytes.is_empty() && is_full {
                self.flush_chunk(log)?;
                pair.clear();
                put_key_delta(&mut pair, &self.last, key);
                entry.encode(&mut pair);
            }
            self.bytes.extend_from_slice(&pair);
            self.last.clone_from(key);
            self.keys_bytes = self.keys_bytes.saturating_add(key.len());
        }
        self.taken = pairs.len();
        Ok(())
    }

    /// Stores the last chunk and returns all of them.
    pub fn finish(mut self, log: &mut LogWriter) -> Result<Vec<BlockPtr>> {
        if !self.bytes.is_empty() {
            self.flush_chunk(log)?;
        }
        Ok(self.stored)
    }

    fn flush_chunk(&mut self, log: &mut LogWriter) -> Result<()> {
        self.stored.push(log.append_block(&self.bytes, false)?);
        self.bytes.clear();
        self.last.clear();
        self.keys_bytes = 0;
        Ok(())
    }
}

/// Decodes one chunk of a run or an image.
pub(crate) fn read_chunk(bytes: &[u8], at: u64, into: &mut Vec<(Key, Entry)>) -> Result<()> {
    let mut reader = Reader::new(bytes, at);
    let (mut key, mut room) = (Key::new(), decoded_len_max(bytes.len()));
    while !reader.is_done() {
        let entry = read_pair_delta(&mut reader, &mut key)?;
        room = room.checked_sub(key.len()).ok_or_else(|| reader.corrupt("a run's length"))?;
        if into.last().is_some_and(|(previous, _)| previous.as_slice() >= key.as_slice()) {
            return Err(reader.corrupt("pairs of a run that are out of order"));
        }
        into.push((key.clone(), entry));
    }
    Ok(())
}
