//! Lent data: read-only, reference-counted, passed without a copy.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A range of data that its owner keeps while a slice of it lives, such as a cache page or a
/// client's data. All holders of a clone can read it; none can change it.
#[derive(Clone)]
pub struct SharedSlice {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedSlice {
    /// Creates a slice of all bytes of `owner`.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let range = 0..owner.as_ref().len();
        Self { owner: Arc::new(owner), range }
    }

    /// Creates a slice of `range` of `owner`, clipped to its length.
    pub fn from_owner(owner: Arc<dyn AsRef<[u8]> + Send + Sync>, range: Range<usize>) -> Self {
        let end = range.end.min((*owner).as_ref().len());
        Self { range: range.start.min(end)..end, owner }
    }

    /// Returns a sub-slice, clipped to the bounds.
    #[must_use]
    pub fn slice(&self, part: Range<usize>) -> Self {
        let Range { start, end } = self.range;
        let from = start.saturating_add(part.start).min(end);
        let to = start.saturating_add(part.end).clamp(from, end);
        Self { owner: self.owner.clone(), range: from..to }
    }
}

impl std::ops::Deref for SharedSlice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        (*self.owner).as_ref().get(self.range.clone()).unwrap_or_default()
    }
}

impl AsRef<[u8]> for SharedSlice {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for SharedSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Piece({} bytes)", self.range.len())
    }
}

/// Contents of a block, filled from its start with slices.
#[derive(Debug)]
pub(crate) struct SliceList {
    pub(crate) len: usize,
    filled: usize,
    pieces: Vec<SharedSlice>,
}

impl SliceList {
    pub(crate) fn new(len: usize) -> Self {
        Self { len, filled: 0, pieces: Vec::new() }
    }

    /// Appends `piece` if `at` is the end of the filled part and it fits.
    pub(crate) fn push(
        &mut self,
        at_bytes: usize,
        piece: SharedSlice,
    ) -> Result<usize, SharedSlice> {
        let n = piece.len();
        if at_bytes != self.filled || n > self.len - self.filled {
            return Err(piece);
        }
        self.filled += n;
        self.pieces.push(piece);
        Ok(n)
    }

    pub(crate) fn pieces(&self) -> &[SharedSlice] {
        &self.pieces
    }

    /// Returns the number of filled bytes.
    pub(crate) fn filled(&self) -> usize {
        self.filled
    }

    /// Copies from `at`; bytes that no slice fills are zero.
    pub(crate) fn copy_out(&self, mut at: usize, mut into: &mut [u8]) {
        for piece in &self.pieces {
            let Some(from) = piece.get(at..) else {
                at -= piece.len();
                continue;
            };
            let n = from.len().min(into.len());
            let (head, rest) = into.split_at_mut(n);
            head.copy_from_slice(&from[..n]);
            (into, at) = (rest, 0);
        }
        into.fill(0);
    }
}
