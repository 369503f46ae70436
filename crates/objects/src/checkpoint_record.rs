//! Encoding of a checkpoint record.

use crate::Result;
use crate::codec::{Reader, put_varint};
use crate::index::tree::BlockPtr;
use crate::log::StreamPosition;

/// Contents of a checkpoint.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct CheckpointRecord {
    /// Last commit in runs and image.
    pub seq: u64,
    /// Commit that contains this record: durable.
    pub own_seq: u64,
    pub clock: u64,
    pub next_id: u64,
    pub links: u64,
    pub root: Option<BlockPtr>,
    pub runs: Vec<Vec<BlockPtr>>,
    pub replayed_log: Vec<BlockPtr>,
    pub places: Vec<StreamPosition>,
    pub table: Vec<BlockPtr>,
}

fn put_ptrs(out: &mut Vec<u8>, ptrs: &[BlockPtr]) {
    put_varint(out, ptrs.len() as u64);
    ptrs.iter().for_each(|ptr| ptr.encode(out));
}

fn read_ptrs(reader: &mut Reader<'_>) -> Result<Vec<BlockPtr>> {
    (0..reader.varint_u32()?).map(|_| BlockPtr::decode(reader)).collect()
}

impl CheckpointRecord {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![];
        for number in [self.seq, self.own_seq, self.clock, self.next_id, self.links] {
            put_varint(&mut out, number);
        }
        put_ptrs(&mut out, self.root.as_slice());
        put_varint(&mut out, self.runs.len() as u64);
        self.runs.iter().for_each(|run| put_ptrs(&mut out, run));
        put_ptrs(&mut out, &self.replayed_log);
        put_varint(&mut out, self.places.len() as u64);
        for (segment, pos, next) in &self.places {
            for number in [segment, pos, next] {
                put_varint(&mut out, u64::from(*number));
            }
        }
        put_ptrs(&mut out, &self.table);
        out
    }

    pub fn decode(bytes: &[u8], at: u64) -> Result<Self> {
        let mut reader = Reader::new(bytes, at);
        let reader = &mut reader;
        let [seq, own_seq, clock, next_id, links] = [
            reader.counter()?,
            reader.counter()?,
            reader.counter()?,
            // Numbers of salvaged objects may be any.
            reader.varint()?,
            reader.counter()?,
        ];
        let root = read_ptrs(reader)?.first().copied();
        let runs = (0..reader.varint_u32()?).map(|_| read_ptrs(reader)).collect::<Result<_>>()?;
        let image = read_ptrs(reader)?;
        let places = (0..reader.varint_u32()?)
            .map(|_| Ok((reader.varint_u32()?, reader.varint_u32()?, reader.varint_u32()?)))
            .collect::<Result<_>>()?;
        let table = read_ptrs(reader)?;
        Ok(Self {
            seq,
            own_seq,
            clock,
            next_id,
            links,
            root,
            runs,
            replayed_log: image,
            places,
            table,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoint_record_round_trips() {
        let ptr = |at| BlockPtr { at, len: 9, sum: at * 7 };
        let blob = CheckpointRecord {
            seq: 1,
            own_seq: 2,
            clock: 3,
            next_id: 4,
            links: 5,
            root: Some(ptr(6)),
            runs: vec![vec![ptr(1), ptr(2)], vec![]],
            replayed_log: vec![ptr(8)],
            places: vec![(1, 2, 3), (4, 5, 6)],
            table: vec![ptr(9)],
        };
        let bytes = blob.encode();
        assert_eq!(CheckpointRecord::decode(&bytes, 0), Ok(blob));
        for len in 0..bytes.len() {
            assert!(CheckpointRecord::decode(&bytes[..len], 0).is_err());
        }
        let overflowing = CheckpointRecord { seq: u64::MAX, ..CheckpointRecord::default() };
        assert!(CheckpointRecord::decode(&overflowing.encode(), 0).is_err());
    }
}
