//! Android sparse images, as `img2simg` and `fastboot` have them.
//!
//! ```text
//!   | header | chunk: raw, fill, nothing, checksum | chunk | ..
//! ```

use crate::inside::{Map, Place};
use crate::source::{Source, le16, le32};
use crate::{Error, Unsupported};

/// Chunks of one image.
const MOST_CHUNKS: u32 = 4 << 20;

/// From which byte of the disk on, and what is there.
struct Chunk {
    start: u64,
    what: What,
}

enum What {
    Raw(u64),
    Fill([u8; 4]),
}

pub(crate) struct Android {
    len_bytes: u64,
    chunks: Vec<Chunk>,
}

impl Android {
    pub(crate) fn open(file: &Source) -> Result<Self, Error> {
        let head = file.bytes(0, 28)?;
        if le16(&head, 4) != 1 {
            return Err(Unsupported::Version("Android sparse image", le16(&head, 4).into()).into());
        }
        let (head_bytes, chunk_bytes) = (u64::from(le16(&head, 8)), u64::from(le16(&head, 10)));
        let block = u64::from(le32(&head, 12));
        let (blocks, count) = (u64::from(le32(&head, 16)), le32(&head, 20));
        let possible = block.is_multiple_of(4) && (4..=1 << 20).contains(&block);
        if !possible || head_bytes < 28 || chunk_bytes < 12 || count > MOST_CHUNKS {
            return Err(Error::Damaged("Android sparse image: an impossible header"));
        }
        let len_bytes = blocks * block;
        let (mut at, mut start) = (head_bytes, 0);
        let mut chunks = vec![];
        for _ in 0..count {
            let head = file.bytes(at, 12)?;
            let (kind, len) = (le16(&head, 0), u64::from(le32(&head, 4)) * block);
            let total = u64::from(le32(&head, 8));
            let data = at + chunk_bytes;
            let counted = total.checked_sub(chunk_bytes);
            let fits = |bytes: u64| counted == Some(bytes);
            match kind {
                0xCAC1 if fits(len) => chunks.push(Chunk { start, what: What::Raw(data) }),
                0xCAC2 if fits(4) => {
                    let mut fill = [0; 4];
                    file.read(data, &mut fill)?;
                    chunks.push(Chunk { start, what: What::Fill(fill) });
                }
                0xCAC3 if fits(0) => chunks.push(Chunk { start, what: What::Fill([0; 4]) }),
                0xCAC4 => {}
                _ => return Err(Error::Damaged("Android sparse image: an impossible chunk")),
            }
            at = at.saturating_add(total);
            if kind != 0xCAC4 {
                start += len;
            }
            if start > len_bytes {
                return Err(Error::Damaged("Android sparse image: chunks beyond its length"));
            }
        }
        if start < len_bytes {
            chunks.push(Chunk { start, what: What::Fill([0; 4]) });
        }
        Ok(Self { len_bytes, chunks })
    }
}

impl Map for Android {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn find(&self, _: &Source, at: u64) -> Result<(Place, u64), Error> {
        let behind = self.chunks.partition_point(|chunk| chunk.start <= at);
        let end = self.chunks.get(behind).map_or(self.len_bytes, |next| next.start);
        let run = end.saturating_sub(at).max(1);
        let chunk = behind.checked_sub(1).and_then(|nth| self.chunks.get(nth));
        Ok(match chunk {
            Some(Chunk { start, what: What::Raw(from) }) => (Place::At(from + (at - start)), run),
            Some(Chunk { what: What::Fill([0, 0, 0, 0]), .. }) | None => (Place::Zeros, run),
            Some(Chunk { what: What::Fill(bytes), .. }) => {
                // A page of the pattern, from wherever in it.
                let piece = u64::from(u32::from_le_bytes(*bytes));
                (Place::Packed { piece, skip: at % 4096 }, run.min(4096 - at % 4096))
            }
        })
    }

    fn unpack(&self, _: &Source, piece: u64) -> Result<Vec<u8>, Error> {
        Ok((piece as u32).to_le_bytes().repeat(1024))
    }
}
