//! A sparse image in memory: zero pages take none.

use std::sync::Arc;

use draconis_device::Extent;

const PAGE_BYTES: usize = 4096;
/// Number of pages that share a list.
const CHUNK_PAGES: usize = 512;

type Page = [u8; PAGE_BYTES];
type Chunk = [Option<Arc<Page>>; CHUNK_PAGES];

/// Bytes that are initially zero. Copies share pages until one of them changes.
#[derive(Clone, Debug)]
pub(crate) struct SparseImage {
    chunks: Vec<Option<Box<Chunk>>>,
}

/// Part of a page: its number, and the range in it.
type PagePart = (usize, std::ops::Range<usize>);

impl SparseImage {
    pub(crate) fn new(len_bytes: u64) -> Self {
        let chunks = len_bytes.div_ceil((PAGE_BYTES * CHUNK_PAGES) as u64) as usize;
        Self { chunks: vec![None; chunks] }
    }

    pub(crate) fn read(&self, at_bytes: u64, into: &mut [u8]) {
        for (place, (page, range)) in split_into_pages(Extent::new(at_bytes, into.len() as u64)) {
            let into = &mut into[place..place + range.len()];
            match self.page_at(page) {
                Some(bytes) => into.copy_from_slice(&bytes[range]),
                None => into.fill(0),
            }
        }
    }

    pub(crate) fn write(&mut self, at_bytes: u64, from: &[u8]) {
        for (place, (page, range)) in split_into_pages(Extent::new(at_bytes, from.len() as u64)) {
            let from = &from[place..place + range.len()];
            match <&Page>::try_from(from) {
                // Zero pages are not stored.
                Ok(_) if is_zero(from) => self.free_page(page),
                Ok(whole) => *self.page_slot(page) = Some(Arc::new(*whole)),
                Err(_) => {
                    let slot =
                        self.page_slot(page).get_or_insert_with(|| Arc::new([0; PAGE_BYTES]));
                    Arc::make_mut(slot)[range].copy_from_slice(from);
                }
            }
        }
    }

    /// Zeroes `extent`.
    pub(crate) fn zero_extent(&mut self, extent: Extent) {
        for (_, (page, range)) in split_into_pages(extent) {
            if range.len() == PAGE_BYTES {
                self.free_page(page);
            } else if self.page_at(page).is_some() {
                let slot = self.page_slot(page).get_or_insert_with(|| Arc::new([0; PAGE_BYTES]));
                Arc::make_mut(slot)[range].fill(0);
            }
        }
    }

    /// Returns the number of stored pages.
    pub(crate) fn allocated_pages(&self) -> usize {
        let pages = |chunk: &Chunk| chunk.iter().filter(|page| page.is_some()).count();
        self.chunks.iter().flatten().map(|chunk| pages(chunk)).sum()
    }

    fn page_at(&self, page: usize) -> Option<&Arc<Page>> {
        self.chunks[page / CHUNK_PAGES].as_ref()?[page % CHUNK_PAGES].as_ref()
    }

    fn page_slot(&mut self, page: usize) -> &mut Option<Arc<Page>> {
        let chunk = self.chunks[page / CHUNK_PAGES]
            .get_or_insert_with(|| Box::new([const { None }; CHUNK_PAGES]));
        &mut chunk[page % CHUNK_PAGES]
    }

    fn free_page(&mut self, page: usize) {
        if let Some(chunk) = &mut self.chunks[page / CHUNK_PAGES] {
            chunk[page % CHUNK_PAGES] = None;
        }
    }
}

/// Splits `extent` into parts of pages, each with its offset in the extent.
fn split_into_pages(extent: Extent) -> impl Iterator<Item = (usize, PagePart)> {
    let mut place = 0;
    std::iter::from_fn(move || {
        let rest = extent.len_bytes as usize - place;
        let at = extent.start_bytes as usize + place;
        let from = at % PAGE_BYTES;
        let len = rest.min(PAGE_BYTES - from);
        let part = (place, (at / PAGE_BYTES, from..from + len));
        place += len;
        (len > 0).then_some(part)
    })
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use draconis_device::Random;

    #[test]
    fn sparse_image_matches_plain_buffer() {
        const IMAGE_BYTES: usize = 5 << 20;
        let (mut image, mut plain) = (SparseImage::new(IMAGE_BYTES as u64), vec![0; IMAGE_BYTES]);
        let mut dice = Random::new(1);
        for round in 0..2000u32 {
            let len = 512 * (1 + dice.next_below(40) as usize);
            let at = 512 * dice.next_below(((IMAGE_BYTES - len) / 512) as u64) as usize;
            if dice.next_below(4) == 0 {
                image.zero_extent(Extent::new(at as u64, len as u64));
                plain[at..at + len].fill(0);
            } else {
                let bytes = vec![(round % 5) as u8; len];
                image.write(at as u64, &bytes);
                plain[at..at + len].copy_from_slice(&bytes);
            }
        }
        let mut all = vec![1; IMAGE_BYTES];
        image.read(0, &mut all);
        assert!(all == plain);
    }

    #[test]
    fn zero_pages_are_free_and_clones_share_pages() {
        let mut image = SparseImage::new(1 << 40);
        image.write((1 << 40) - 8192, &[1; 8192]);
        let mut copy = image.clone();
        assert_eq!(copy.allocated_pages(), 2);
        copy.write((1 << 40) - 8192, &[0; 4096]);
        copy.zero_extent(Extent::new((1 << 40) - 4096, 4096));
        assert_eq!((copy.allocated_pages(), image.allocated_pages()), (0, 2));
        let mut byte = [0];
        image.read((1 << 40) - 1, &mut byte);
        assert_eq!(byte, [1]);
    }
}
